"""Teachers of 32 MiB on several ranks, for test_teacher_ranks.py.

One in each of the modes that keep it on the host, then one from weights that differ by rank.
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
    """This process's share of memory that no file backs, once all processes are where this one is.

    The share of a library's pages depends on which other programs on the machine use it.
    """
    gc.collect()
    return_freed_memory()  # of the slots, which stand for device memory
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
    # Giving up its own copy of the weights is the point: a private copy would have changed nothing.
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
    """Return the bytes, files and messages that this rank saw."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    visit("stream", width=8)  # imports and buffers that come with first use
    different = copy.deepcopy(network(seed=0))
    different[3].weight[5, 7] += rank == 1
    return {
        "swap": visit("swap"),
        "stream": visit("stream"),
        "refusal": refusal(different),
        "named": [str(file) for file in Path("/dev/shm").glob("*hf_memopt*")],
    }
