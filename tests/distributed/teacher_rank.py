"""Teachers of 128 MiB in each mode on the host, then one whose weights differ by rank, for test_teacher_ranks.py."""

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


def network(seed: int, width: int = 2048) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8))).eval().requires_grad_(False)


def pss_bytes() -> int:
    """Return this process's share of memory without libraries, whose pages other programs share."""
    gc.collect()
    return_freed_memory()  # memory of the slots, which stand for device memory
    distributed.barrier()
    maps = psutil.Process().memory_maps(grouped=True)
    bytes_now = sum(part.pss for part in maps if part.path.startswith(("[anon]", "[heap]", FILE)))
    distributed.barrier()
    return int(bytes_now)


def visit(mode: Any, width: int = 2048) -> dict[str, Any]:
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
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    for mode in ("swap", "stream"):
        visit(mode, width=8)  # pays for imports, buffers, and pages that a forked process copies at first use
    different = copy.deepcopy(network(seed=0))
    different[3].weight[5, 7] += rank == 1
    return {
        "swap": visit("swap"),
        "stream": visit("stream"),
        "refusal": refusal(different),
        "named": [str(file) for file in Path("/dev/shm").glob("*hf_memopt*")],
    }
