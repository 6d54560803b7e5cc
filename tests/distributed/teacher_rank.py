"""Teachers of 32 MiB on several ranks, for test_teacher_ranks.py.

There is a teacher in each mode that keeps it on the host, then one with weights that differ by rank.
"""

import copy
import gc
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed, nn

from hf_memopt.transfer import SyncCopier
from hf_memopt.transfer.host_memory import return_freed_memory
from hf_memopt.weights import OffloadedTeacher

FILE = "/memfd:hf_memopt"


def network(seed: int, width: int = 1024) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8))).eval().requires_grad_(False)


def pss_bytes() -> int:
    """Return this process's share of memory without a file, once all processes have reached this call.

    The share of a library's pages depends on the other programs on the machine that use the library.
    """
    gc.collect()
    return_freed_memory()  # memory of the slots, which stand for device memory
    distributed.barrier()
    maps = psutil.Process().memory_maps(grouped=True)
    bytes_now = sum(part.pss for part in maps if part.path.startswith(("[anon]", "[heap]", FILE)))
    distributed.barrier()
    return int(bytes_now)


def visit(mode: Any, width: int = 1024) -> dict[str, Any]:
    module = network(0, width)
    x = torch.ones(1, width)
    want = module(x)
    before = pss_bytes()
    teacher = OffloadedTeacher(module, device="cpu", mode=mode, copier=SyncCopier())
    equal = []
    for _ in range(2):
        with teacher.onload() as module:
            equal.append(torch.equal(module(x), want))
        distributed.barrier()
    equal.append(torch.equal(module(x), want))
    # The process gives up its own copy of the weights: with a private copy no memory would be freed.
    return {
        "equal": all(equal),
        "weights_bytes": teacher.report().host_bytes,
        "freed_bytes": before - pss_bytes(),
        "files": [file.path for file in psutil.Process().memory_maps() if file.path.startswith(FILE)],
    }


def refusal(module: nn.Module) -> str:
    try:
        OffloadedTeacher(module, device="cpu", mode="swap", copier=SyncCopier())
    except ValueError as error:
        return str(error)
    return "none"


def outcomes() -> dict[str, Any]:
    """Return the bytes, files and messages of this rank."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    visit("stream", width=8)  # pays for imports and buffers of the first use
    different = copy.deepcopy(network(seed=0))
    different[3].weight[5, 7] += rank == 1
    return {
        "swap": visit("swap"),
        "stream": visit("stream"),
        "refusal": refusal(different),
        "named": [str(file) for file in Path("/dev/shm").glob("*hf_memopt*")],
    }
