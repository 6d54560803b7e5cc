"""Memory of a tensor whose storage stays the same object, and has bytes only at times."""

import contextlib
import ctypes
import mmap
import os
import sys
from typing import Protocol

import torch
from torch import Tensor

from hf_memopt.transfer.direct_io import PAGE
from hf_memopt.units import MIB, format_bytes

# Faulted in and zeroed as one page where the system has such.
_HUGE_PAGE = 2 * MIB

_PROT_NONE = 0


class StorageMemory(Protocol):
    """Memory that comes and goes; it is there at first.

    Attributes:
        block: `(num_bytes,)` uint8, of the same storage at all times.
        is_there: whether `block` may be read and written; without memory that ends the process.
    """

    block: Tensor

    @property
    def is_there(self) -> bool: ...

    def give(self) -> None:
        """Have memory, uninitialised; a MemoryError or RuntimeError if there is not enough."""

    def take(self) -> None:
        """Give the memory up. Work submitted so far may still read it."""


class ResizedMemory:
    """Memory of torch's allocator for the device, which may keep it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes = num_bytes
        self.block = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._storage = self.block.untyped_storage()

    @property
    def is_there(self) -> bool:
        return self._storage.nbytes() > 0

    def give(self) -> None:
        self._storage.resize_(self._num_bytes)

    def take(self) -> None:
        self._storage.resize_(0)


class WholePages:
    """Whole pages of the host around a block that begins `offset` bytes after a page, for direct I/O.

    Their addresses are reserved once, and take no memory in between: the system has it back at once, where an allocator
    keeps it. Linux only.

    Attributes:
        pages: uint8, the block with the rest of its first and last page.
    """

    def __init__(self, num_bytes: int, offset: int) -> None:
        size = -(-(offset + num_bytes) // PAGE) * PAGE
        unit = _HUGE_PAGE if size >= _HUGE_PAGE else PAGE
        self._mapping = mmap.mmap(-1, size + unit - PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        first = -self._address % unit
        self.pages = torch.frombuffer(self._mapping, dtype=torch.uint8, offset=first, count=size)
        # With a storage of its own, which has no more bytes when it is saved or copied.
        self.block = torch.frombuffer(self._mapping, dtype=torch.uint8, offset=first + offset, count=num_bytes)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._is_there = True

    @staticmethod
    def are_available() -> bool:
        return sys.platform == "linux"

    @property
    def is_there(self) -> bool:
        return self._is_there

    def give(self) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        self._is_there = True

    def take(self) -> None:
        self._is_there = False
        self._mapping.madvise(mmap.MADV_DONTNEED)
        self._protect(_PROT_NONE)

    def share_with_forks(self, is_wanted: bool) -> None:
        """Choose whether forks see the pages. A read under way would end in those that a fork takes over."""
        self._mapping.madvise(mmap.MADV_DOFORK if is_wanted else mmap.MADV_DONTFORK)

    def _protect(self, protection: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(self._address), ctypes.c_size_t(len(self._mapping)), protection):
            reason = os.strerror(ctypes.get_errno())
            raise MemoryError(f"cannot allocate {format_bytes(self.pages.nbytes)} of host memory: {reason}")
