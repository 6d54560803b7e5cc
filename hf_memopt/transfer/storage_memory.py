"""Memory of a tensor whose storage stays the same object, and has bytes only at times.

    absent ── give() ──► filling ── show() ──► present ── take() ──► absent

Views of the block may be anywhere: saved by autograd, in a closure, in another module. While the bytes are not there,
or are on their way, every read or write of one is a RuntimeError in Python, from torch's own check of data pointers.
"""

import contextlib
import ctypes
import mmap
import os
import sys
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from hf_memopt.transfer.direct_io import PAGE
from hf_memopt.units import MIB, format_bytes

# Faulted in and zeroed as one page where the system has such.
_HUGE_PAGE = 2 * MIB

_PROT_NONE = 0

# Types of devices whose storages can be guarded. Elsewhere a read of absent memory is undefined.
_GUARDED = ("cpu", "cuda", "xpu")


class StorageMemory(Protocol):
    """Memory that comes and goes; present at first.

    Attributes:
        block: `(num_bytes,)` uint8, of the same storage at all times, for views.
        is_there: whether it has memory, filled or not.
    """

    block: Tensor

    @property
    def is_there(self) -> bool: ...

    def give(self) -> Tensor:
        """Return uninitialised memory to fill, `(num_bytes,)` uint8; a MemoryError or RuntimeError if there is none."""

    def show(self) -> None:
        """Open the memory, which has been filled, to views of the block."""

    def take(self) -> None:
        """Give the memory up. Work submitted so far may still read it."""


class AccessGuard:
    """Makes each access to a storage raise an error, as long as the storage is closed.

    torch can close a storage only for good (`_set_storage_data_ptr_access_error_msg`). So this object itself sets the
    fields of the storage that say whether it is closed. Costs a microsecond.

    Args:
        storage: of a plain tensor; kept by whoever has the guard.
        message: of the RuntimeError.
    """

    def __init__(self, storage: UntypedStorage, message: str) -> None:
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)
        flags, size = _fields_of_storages()
        self._flags = [ctypes.c_bool.from_address(storage._cdata + offset) for offset in flags]
        self._size = ctypes.c_int64.from_address(storage._cdata + size)
        self._message = message
        self._is_shared = storage.device.type == "cuda"  # torch's answer for private memory
        # torch's own method does not handle the error, and would end the process.
        storage.is_shared = self._ask_whether_shared  # type: ignore[method-assign]

    def close(self) -> None:
        for flag in self._flags:
            flag.value = True

    def open(self) -> None:
        for flag in self._flags:
            flag.value = False

    def claim_size(self, num_bytes: int) -> None:
        """Set the size of a closed storage without memory, so that views of it can be made."""
        self._size.value = num_bytes

    def _ask_whether_shared(self) -> bool:
        if self._flags[0].value:
            raise RuntimeError(self._message)
        return self._is_shared


@cache
def _fields_of_storages() -> tuple[tuple[int, ...], int]:
    """Return where in a storage object torch keeps the flags of a closed one, and its size: by closing one."""
    num_bytes, length, word = 0x5EED5, 96, 8  # the message's pointer is the object's last field
    storage = torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()
    memory = (ctypes.c_ubyte * length).from_address(storage._cdata)
    before = bytes(memory)
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, "closed")
    after = bytes(memory)
    starts = range(0, length, word)
    sizes = [start for start in starts if int.from_bytes(before[start : start + word], "little") == num_bytes]
    pointers = {
        start for start in starts if not any(before[start : start + word]) and any(after[start + 2 : start + word])
    }
    flags = tuple(
        place
        for place in range(length)
        if (before[place], after[place]) == (0, 1) and place // word * word not in pointers
    )
    is_known = len(flags) == 2 and len(sizes) == 1
    for place in flags if is_known else ():
        memory[place] = 0
    if not is_known or storage.data_ptr() == 0:
        raise RuntimeError(f"torch {torch.__version__} keeps the state of storages in another way; use torch 2.11")
    return flags, sizes[0]


class ResizedMemory:
    """Memory of torch's allocator for the device, which may keep it.

    Args:
        num_bytes: of the block.
        device: of the block.
        message: of the error that an access to absent memory raises.
    """

    def __init__(self, num_bytes: int, device: torch.device, message: str) -> None:
        self._num_bytes = num_bytes
        self.block = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._storage = self.block.untyped_storage()
        # Simulated tensors have no memory.
        can_guard = type(self.block) is Tensor and device.type in _GUARDED
        self._guard = AccessGuard(self._storage, message) if can_guard else None
        self._is_there = True
        self.show()

    @property
    def is_there(self) -> bool:
        return self._is_there

    def give(self) -> Tensor:
        if self._guard is None:
            self._storage.resize_(self._num_bytes)
            self._is_there = True
            return self.block
        self._guard.open()
        try:
            self._guard.claim_size(0)
            self._storage.resize_(self._num_bytes)
            self._is_there = True
            address = self._storage.data_ptr()
        finally:
            self._guard.close()
            self._guard.claim_size(self._num_bytes)
        return torch.empty(0, dtype=torch.uint8, device=self.block.device).set_(
            torch._C._construct_storage_from_data_pointer(address, self.block.device, self._num_bytes)
        )

    def show(self) -> None:
        if self._guard is not None:
            self._guard.open()

    def take(self) -> None:
        if not self._is_there:
            return
        if self._guard is not None:
            self._guard.open()
            self._guard.claim_size(0)  # an interrupt may have come between this and the end of the last call
        try:
            self._storage.resize_(0)
            self._is_there = False
        finally:
            if self._guard is not None:
                self._guard.close()
                self._guard.claim_size(self._num_bytes)


class WholePages:
    """Whole pages of the host around a block that begins `offset` bytes after a page, for direct I/O.

    Their addresses are reserved once, and take no memory in between: the system has it back at once, where an allocator
    keeps it. Linux only.

    Attributes:
        pages: uint8, the block with the rest of its first and last page, whether the block may be accessed or not.
        address: of the block.
    """

    def __init__(self, num_bytes: int, offset: int, message: str) -> None:
        size = -(-(offset + num_bytes) // PAGE) * PAGE
        unit = _HUGE_PAGE if size >= _HUGE_PAGE else PAGE
        self._mapping = mmap.mmap(-1, size + unit - PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        first = -self._address % unit
        self.pages = torch.frombuffer(self._mapping, dtype=torch.uint8, offset=first, count=size)
        self._to_fill = self.pages[offset : offset + num_bytes]
        self.address = self._to_fill.data_ptr()
        # With a storage of its own, which has no more bytes when it is saved or copied.
        self.block = torch.frombuffer(self._mapping, dtype=torch.uint8, offset=first + offset, count=num_bytes)
        self._guard = AccessGuard(self.block.untyped_storage(), message)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._is_there = True
        self.show()

    @staticmethod
    def are_available() -> bool:
        return sys.platform == "linux"

    @property
    def is_there(self) -> bool:
        return self._is_there

    def give(self) -> Tensor:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        self._is_there = True
        return self._to_fill

    def show(self) -> None:
        self._guard.open()

    def take(self) -> None:
        self._guard.close()
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
