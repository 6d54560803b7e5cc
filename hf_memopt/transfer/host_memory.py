"""Pinned host memory of exactly the size that is asked for."""

import contextlib
import logging
import os
import weakref
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def pinned_empty(num_bytes: int, device: torch.device) -> Tensor:
    """Uninitialised page-locked memory, `(num_bytes,)` uint8; pageable, with one warning, where it cannot be had.

    torch rounds its own pinned allocations up to a power of two, up to twice the size (pytorch issue 150517), which
    matters for a block of gigabytes. On CUDA the pages of an ordinary allocation are registered with the driver
    instead, and given back when the memory is freed.
    """
    if device.type != "cuda":
        return _pinned_by_torch(num_bytes)
    block = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes == 0:
        return block
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(block.data_ptr(), num_bytes, 0))
    if error:
        _clear_last_error(device)
        _warn_pageable(f"cudaHostRegister returned error {error}")
        return block
    # Tied to the storage: views outlive the tensor returned here. Not at exit, when the driver may be gone already.
    finalizer = weakref.finalize(block.untyped_storage(), runtime.cudaHostUnregister, block.data_ptr())
    finalizer.atexit = False
    return block


def available_bytes() -> int:
    """Host memory that this process may take: what the system has available, shared with the node's other ranks."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        kib = next(line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        available = 1024 * int(kib)
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _clear_last_error(device: torch.device) -> None:
    # A refused registration stays CUDA's "last error", which the next kernel launch would report as its own.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _pinned_by_torch(num_bytes: int) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        _warn_pageable(str(error))
        return torch.empty(num_bytes, dtype=torch.uint8)


@cache
def _warn_pageable(reason: str) -> None:
    """Once for each reason: blocks are many."""
    logger.warning(
        "cannot pin host memory (%s); copies will be slower and block the host. "
        "Raise the locked-memory limit (ulimit -l) or free host memory.",
        reason,
    )
