"""Pinned host memory of exactly the size that is asked for."""

import contextlib
import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._logging._internal import warning_once

from hf_memopt.units import MIB

logger = logging.getLogger(__name__)

# From here on huge pages are asked for, faulted in and page-locked far faster; they round up to 2 MiB.
_LARGE_BYTES = 64 * MIB

_M_MMAP_THRESHOLD = -3

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def pinned_empty(num_bytes: int, device: torch.device) -> Tensor:
    """Uninitialised page-locked memory, `(num_bytes,)` uint8; pageable, with one warning, where it cannot be had.

    torch rounds pinned allocations up to a power of two (pytorch issue 150517), which matters for gigabytes. On CUDA
    the driver registers pages of our own instead: one that two allocations share cannot be registered twice.
    """
    if device.type != "cuda":
        return _pinned_by_torch(num_bytes)
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    pages = Pages(-1, num_bytes)
    if num_bytes >= _LARGE_BYTES:
        advise_huge_pages(pages)
    return pinned_pages(pages, device)


def advise_huge_pages(pages: mmap.mmap) -> None:
    """Ask for huge pages, which are faulted in and zeroed as one, where the system has them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)


class Pages(mmap.mmap):
    """Memory of our own. An `mmap` calls its finalizers only after unmapping, and CUDA has to be told before."""

    _registered: tuple[int, torch.device, int] | None = None

    def register(self, address: int, device: torch.device) -> int:
        """Page-lock the memory, which lies at `address`; returns CUDA's error code, 0 for none."""
        error = int(_runtime().cudaHostRegister(address, len(self), 0))
        if error:
            _clear_last_error(device)
        else:
            self._registered = address, device, os.getpid()
        return error

    def __del__(self) -> None:
        if self._registered is None:
            return
        address, device, process = self._registered
        if not driver_is_gone(process) and (error := int(_runtime().cudaHostUnregister(address))):
            _clear_last_error(device)
            message = "cannot give page-locked host memory back: cudaHostUnregister returned error %d"
            warning_once(logger, message, error)


def pinned_pages(pages: Pages, device: torch.device) -> Tensor:
    """Page-lock memory mapped already; pageable elsewhere than on CUDA, and with one warning where that fails."""
    block = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the pages, as every view of it does
    if device.type != "cuda":
        return block
    error = pages.register(block.data_ptr(), device)
    if error:
        _warn_pageable(f"cudaHostRegister returned error {error}")
    return block


def mapped_on_cuda(memory: Tensor, device: torch.device) -> Tensor:
    """Return page-locked host memory, `(num_bytes,)` uint8, in CUDA's address space; a ValueError for any other."""
    if memory.nbytes == 0:
        return memory.to(device)
    if device.type != "cuda" or not memory.is_pinned():
        raise ValueError(
            f"mode='stream' needs host memory that {device} can read in place, which is page-locked memory on CUDA; "
            "raise the locked-memory limit (ulimit -l), or use mode='swap'"
        )
    mapped = torch.as_tensor(_CudaArray(memory, device), device=device)
    assert mapped.data_ptr() == memory.data_ptr(), "torch copied what it should have mapped"
    return mapped


def driver_is_gone(process: int) -> bool:
    """Return whether a destructor must leave the device alone: at exit, and in forks of the `process` that used it."""
    return sys.is_finalizing() or os.getpid() != process


def return_freed_memory() -> None:
    """Give memory that glibc keeps between blocks in use back to the system; some milliseconds per GiB."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def map_large_blocks(num_bytes: int) -> None:
    """Make glibc return blocks of `num_bytes` or more (32 MiB at most) to the system once they are freed.

    By itself glibc keeps ever larger ones, and with them memory that nothing uses. Each new block costs the system
    about half a second per GiB.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, min(num_bytes, 32 * MIB))
    return_freed_memory()


def available_bytes() -> int:
    """Host memory that this process may take: of the system's or container's, its share among the node's ranks."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        kib = next(line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        available = 1024 * int(kib)
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([available, *cgroup_limits()]) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cgroup_limits(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Iterator[int]:
    """Memory limits in bytes of this process's control groups and those around them, versions 1 and 2."""
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        folder = base / path.lstrip("/")
        # In a container the path may be the host's: its folder is missing, and the root is the container's own.
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(base))):
            text = (group / name).read_text().strip() if (group / name).exists() else "max"
            if text != "max":
                yield int(text)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _clear_last_error(device: torch.device) -> None:
    # A refused call stays CUDA's "last error", which the next kernel launch would report as its own.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _pinned_by_torch(num_bytes: int) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        _warn_pageable(str(error))
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _warn_pageable(reason: str) -> None:
    warning_once(
        logger,
        "cannot pin host memory (%s); copies will be slower and block the host. "
        "Raise the locked-memory limit (ulimit -l) or free host memory.",
        reason,
    )


class _CudaArray:
    """Page-locked host memory as CUDA memory. Queued work may still read it when it goes: the host waits."""

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        self._memory, self._device, self._process = memory, device, os.getpid()
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "strides": None,
            "version": 2,
        }

    def __del__(self) -> None:
        if not driver_is_gone(self._process):
            torch.accelerator.synchronize(self._device)
