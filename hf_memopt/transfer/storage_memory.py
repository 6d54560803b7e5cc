"""Memory of a tensor whose storage stays the same object, and has bytes only at times.

    absent ── give() ──► filling ── show() ──► present ── take() ──► absent

Views of the block may be anywhere: saved by autograd, in a closure, in another module. While the bytes are not there,
or are on their way, every read or write of one is a RuntimeError in Python, from torch's own check of data pointers.
"""

import ctypes
import mmap
import os
import sys
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from hf_memopt.transfer.direct_io import PAGE
from hf_memopt.transfer.host_memory import advise_huge_pages
from hf_memopt.units import MIB, format_bytes

# Faulted in and zeroed as one page where the system has such.
_HUGE_PAGE = 2 * MIB

_PROT_NONE = 0
_MAP_FIXED = 16
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4

# Types of devices whose storages can be guarded. Elsewhere a read of absent memory is undefined.
_GUARDED = ("cpu", "cuda", "xpu")


class AccessGuard:
    """Makes each access to a storage raise an error, as long as the storage is closed.

    torch can close a storage only for good (`_set_storage_data_ptr_access_error_msg`). So this object itself sets the
    fields of the storage that say whether it is closed. Costs a microsecond. The storage is that of a plain tensor, and
    the guard's owner keeps it.
    """

    def __init__(self, storage: UntypedStorage, message: str) -> None:
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)
        fields = _fields_of_storages()
        self._flags = [ctypes.c_bool.from_address(storage._cdata + offset) for offset in fields.closed]
        self._size = ctypes.c_int64.from_address(storage._cdata + fields.size)
        self._is_resizable = ctypes.c_bool.from_address(storage._cdata + fields.is_resizable)
        self._allocator = ctypes.c_void_p.from_address(storage._cdata + fields.allocator)
        # Memory of another owner has none, and torch would ask that.
        self._own_allocator = self._allocator.value or fields.allocator_of_host
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

    @property
    def is_exported(self) -> bool:
        """Return whether a NumPy array may have the memory: torch forbids to resize its storage from then on."""
        return not self._is_resizable.value

    def allow_resizing(self) -> None:
        self._is_resizable.value = True
        self._allocator.value = self._own_allocator  # `share_memory_` has taken it away

    def claim_size(self, num_bytes: int) -> None:
        """Set the size of a closed storage without memory, so that views of it can be made."""
        self._size.value = num_bytes

    def _ask_whether_shared(self) -> bool:
        if self._flags[0].value:
            raise RuntimeError(self._message)
        return self._is_shared


class _Fields(NamedTuple):
    """Places of fields in torch's storage objects, the flags of a closed one among them, and the value of one."""

    closed: tuple[int, ...]
    size: int
    is_resizable: int
    allocator: int
    allocator_of_host: int


@cache
def _fields_of_storages() -> _Fields:
    """Find the fields: by making an array of a storage, by closing it, and in storages of other owners."""
    num_bytes, length, word = 0x5EED5, 96, 8  # the message's pointer is the object's last field
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    storage = tensor.untyped_storage()
    memory = (ctypes.c_ubyte * length).from_address(storage._cdata)
    states = [bytes(memory)]
    tensor.numpy()
    states.append(bytes(memory))
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, "closed")
    states.append(bytes(memory))
    before, exported, closed = states
    starts = range(0, length, word)
    sizes = [start for start in starts if int.from_bytes(before[start : start + word], "little") == num_bytes]
    pointers = {
        start for start in starts if not any(before[start : start + word]) and any(closed[start + 2 : start + word])
    }
    flags = tuple(
        place
        for place in range(length)
        if (exported[place], closed[place]) == (0, 1) and place // word * word not in pointers
    )
    resizable = [place for place in range(length) if (before[place], exported[place]) == (1, 0)]
    others = torch.empty(1, dtype=torch.uint8, device="cpu"), torch.frombuffer(bytearray(1), dtype=torch.uint8)
    words = [(ctypes.c_uint64 * (length // word)).from_address(each.untyped_storage()._cdata) for each in others]
    allocators = [
        start
        for start, its, foreign in zip(starts, *words, strict=True)
        if int.from_bytes(before[start : start + word], "little") == its != foreign == 0
        and start // word * word not in {place // word * word for place in resizable}
    ]
    is_known = len(flags) == 2 and len(sizes) == len(resizable) == len(allocators) == 1
    for place in flags if is_known else ():
        memory[place] = 0
    if not is_known or storage.data_ptr() == 0:
        raise RuntimeError(f"torch {torch.__version__} keeps the state of storages in another way; use torch 2.11")
    allocator = allocators[0]
    return _Fields(flags, sizes[0], resizable[0], allocator, words[0][allocator // word])


class ResizedMemory:
    """Memory of torch's allocator, which may keep it; an access while it is absent raises `message`."""

    def __init__(self, num_bytes: int, device: torch.device, message: str) -> None:
        self._num_bytes = num_bytes
        # Of the same storage at all times, for views.
        self.block = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._storage = self.block.untyped_storage()
        # Simulated tensors have no memory.
        can_guard = type(self.block) is Tensor and device.type in _GUARDED
        self._guard = AccessGuard(self._storage, message) if can_guard else None
        self._is_there = True
        self.show()

    @property
    def is_exported(self) -> bool:
        """Return whether a NumPy array may have been made of the memory since it was given, which nothing guards."""
        return self._guard is not None and self._guard.is_exported

    def give(self) -> Tensor:
        """Return uninitialised memory to fill, `(num_bytes,)` uint8; a MemoryError or RuntimeError if there is none."""
        if self._guard is None:
            self._is_there = True
            self._storage.resize_(self._num_bytes)
            return self.block
        self._guard.open()
        try:
            self._guard.claim_size(0)
            self._is_there = True
            self._storage.resize_(self._num_bytes)
            address = self._storage.data_ptr()
        finally:
            self._guard.close()
            self._guard.claim_size(self._num_bytes)
        return torch.empty(0, dtype=torch.uint8, device=self.block.device).set_(
            torch._C._construct_storage_from_data_pointer(address, self.block.device, self._num_bytes)
        )

    def show(self) -> None:
        """Open the memory, which has been filled, to views of the block."""
        if self._guard is not None:
            self._guard.open()

    def take(self) -> None:
        """Give the memory up. Work submitted so far may still read it."""
        if not self._is_there:
            return
        if self._guard is not None:
            self._guard.open()
            self._guard.allow_resizing()
            self._guard.claim_size(0)  # an interrupt may have come between this and the end of the last call
        try:
            self._storage.resize_(0)
            self._is_there = False
        finally:
            if self._guard is not None:
                self._guard.close()
                self._guard.claim_size(self._num_bytes)


class SparePages:
    """Huge pages that `WholePages` have given up, until others take them over or `free` is called.

    The system needs a second for 1 to 4 GiB of new pages: each is faulted in and zeroed. To move 32 MiB takes 0.2 ms.
    """

    def __init__(self) -> None:
        # By their owners, ranges of addresses, each of one mapping of the system's.
        self._spare: dict[WholePages, list[range]] = {}

    def add(self, owner: "WholePages", ranges: list[range]) -> None:
        if ranges:
            self._spare[owner] = ranges

    def move(self, to: "WholePages") -> list[range]:
        """Move memory to the first addresses of other pages; returns the ranges of them that have some now."""
        own = self._spare.pop(to, [])
        if own and sum(map(len, own)) == len(to.huge):
            return own
        if own:
            to.free()
        moved: list[range] = []
        first = to.huge.start
        while self._spare and first < to.huge.stop:
            owner, ranges = self._spare.popitem()
            source = ranges.pop()
            num_bytes = min(len(source), to.huge.stop - first)
            rest = source[:-num_bytes]
            flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
            is_moved = _libc().mremap(source.stop - num_bytes, num_bytes, num_bytes, flags, first) == first
            if is_moved and (rest or ranges):
                self._spare[owner] = [*ranges, rest] if rest else ranges
            else:
                owner.free()
            if not is_moved:  # an old system, or too many mappings
                self.free()
                break
            moved.append(range(first, first + num_bytes))
            first += num_bytes
        return moved

    def free(self) -> None:
        while self._spare:
            self._spare.popitem()[0].free()


class WholePages:
    """Whole pages of the host around a block that begins `offset` bytes after a page, for direct I/O.

    Their addresses are reserved once, and take no memory in between. Linux only.

    Args:
        offset: of the block in its first page.
        spare: where their memory goes when it is taken.

    Attributes:
        pages: uint8, the block with the rest of its first and last page, whether the block may be accessed or not.
        huge: addresses of the whole huge pages among them, from the first one on.
    """

    def __init__(self, num_bytes: int, offset: int, message: str, spare: SparePages) -> None:
        size = -(-(offset + num_bytes) // PAGE) * PAGE
        unit = _HUGE_PAGE if size >= _HUGE_PAGE else PAGE
        self._mapping = mmap.mmap(-1, size + unit - PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        first = -torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr() % unit
        self.pages = torch.frombuffer(self._mapping, dtype=torch.uint8, offset=first, count=size)
        self._to_fill = self.pages[offset : offset + num_bytes]
        self.address = self._to_fill.data_ptr()
        # With a storage of its own, which has no more bytes when it is saved or copied.
        self.block = torch.frombuffer(self._mapping, dtype=torch.uint8, offset=first + offset, count=num_bytes)
        self._storage, self._message = self.block.untyped_storage(), message
        self._guard = AccessGuard(self._storage, message)
        self._guard.allow_resizing()
        start = self.pages.data_ptr()
        self._addresses, self.huge = range(start, start + size), range(start, start + size // _HUGE_PAGE * _HUGE_PAGE)
        self._spare = spare
        # The rest would be part of a huge page.
        end = -(-(start + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._unmap(range(end, start - first + len(self._mapping)))
        self._ranges = [self.huge]
        self._is_there = True
        advise_huge_pages(self._mapping)
        self.show()

    @staticmethod
    def are_available() -> bool:
        return sys.platform == "linux"

    @property
    def is_exported(self) -> bool:
        return self._guard.is_exported

    def give(self) -> Tensor:
        if not self._is_there:
            self._ranges = self._spare.move(self)
            moved = sum(map(len, self._ranges))
            rest = self._addresses[moved:]
            if rest and _libc().mprotect(rest.start, len(rest), mmap.PROT_READ | mmap.PROT_WRITE):
                self._give_up()
                raise self._error()
            self._ranges.append(self.huge[moved:])
            self._is_there = True
            advise_huge_pages(self._mapping)
        return self._to_fill

    def show(self) -> None:
        self._guard.open()
        if self._storage.data_ptr() != self.address:
            self._guard.close()
            raise RuntimeError(f"{self._message}; its memory was exchanged")

    def take(self) -> None:
        self._guard.close()
        self._guard.allow_resizing()
        if self._is_there:
            self._is_there = False
            self._give_up()

    def _give_up(self) -> None:
        self._unmap(self._addresses[len(self.huge) :])
        self._spare.add(self, [each for each in self._ranges if each])

    def free(self) -> None:
        """Give memory that was taken back to the system."""
        self._unmap(self._addresses)

    def share_with_forks(self, is_wanted: bool) -> None:
        """Choose whether forks see the pages. A read under way would end in those that a fork takes over."""
        self._mapping.madvise(mmap.MADV_DOFORK if is_wanted else mmap.MADV_DONTFORK)

    def _unmap(self, addresses: range) -> None:
        """Replace whatever is mapped at some addresses by one mapping without memory, which cannot be accessed."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if addresses and _libc().mmap(addresses.start, len(addresses), _PROT_NONE, flags, -1, 0) != addresses.start:
            raise self._error()

    def _error(self) -> MemoryError:
        reason = os.strerror(ctypes.get_errno())
        return MemoryError(f"cannot allocate {format_bytes(self.pages.nbytes)} of host memory: {reason}")


# Present at first; `ResizedMemory` says what the methods do.
StorageMemory = ResizedMemory | WholePages


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = libc.mremap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.mprotect.argtypes = [pointer, size, number]
    libc.mremap.argtypes = [pointer, size, size, number, pointer]
    return libc
