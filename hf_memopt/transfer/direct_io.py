"""Reads and writes between host memory and a file without a copy in between, past the page cache where that works.

Direct I/O moves whole pages only, from memory to the same place within a page of the file. So bytes lie in the file
where they lie in memory, modulo a page, and no more than the two pages at the ends go through memory of our own:

    memory   ....|  .bytes|bytes  |bytes  |byt.   |      `.bytes` and `byt.` are exchanged with pages of our own,
    file         |  .bytes|bytes  |bytes  |byt.   |      the pages between are the tensor's
"""

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from io import FileIO
from itertools import pairwise
from typing import IO

import torch
from torch import Tensor

from hf_memopt.transfer.copier import Copier
from hf_memopt.transfer.host_memory import advise_huge_pages
from hf_memopt.units import format_bytes

PAGE = 4096
# Linux's MADV_WIPEONFORK, which Python has no name for.
_WIPE_ON_FORK = 18

# The most that one call moves, so that several threads share a large tensor. A multiple of a page.
CHUNK_BYTES = 8 * 2**20


def private_pages(num_bytes: int, offset: int = 0) -> Tensor:
    """Return uninitialised memory of our own, `(num_bytes,)` uint8, which begins `offset` bytes after a page does.

    The system has it back as soon as the last tensor is gone, where an allocator would keep it. Forks get empty pages
    in its place: a read that is under way would end in pages that the fork takes over.
    """
    return torch.frombuffer(private_mapping(num_bytes + offset), dtype=torch.uint8)[offset:]


def private_mapping(num_bytes: int) -> mmap.mmap:
    """Return `private_pages` that are no tensor, for memory of a thread.

    A thread that frees a tensor over a mapping while the interpreter ends aborts the process: it may not take the
    interpreter's lock again, and torch's destructors need it.
    """
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {format_bytes(num_bytes)} of host memory") from error
    if sys.platform == "linux":
        pages.madvise(_WIPE_ON_FORK)
    advise_huge_pages(pages)
    return pages


class OwnPages(threading.local):
    """Pages of each thread."""

    def __init__(self, num_bytes: int) -> None:
        self.whole = memoryview(private_mapping(num_bytes))

    @property
    def tensor(self) -> Tensor:
        return torch.frombuffer(self.whole, dtype=torch.uint8)


# Which the ends of a tensor go through.
_ends = OwnPages(2 * PAGE)


def page_aligned(copier: Copier, num_bytes: int) -> Tensor:
    """Return host memory of a copier, `(num_bytes,)` uint8, that begins with a page."""
    memory = copier.empty_host(num_bytes + PAGE)
    first = -memory.data_ptr() % PAGE
    return memory[first : first + num_bytes]


def close_in_forks(file: FileIO | IO[bytes]) -> None:
    """Make forks of this process close a file, so that none of them holds its space."""
    _closed_in_forks.add(file)


_closed_in_forks: "weakref.WeakSet[FileIO | IO[bytes]]" = weakref.WeakSet()


def _close_all() -> None:
    for file in _closed_in_forks:
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


def bypass_page_cache(file: int, is_wanted: bool = True) -> None:
    """Switch direct I/O on or off for an open file; an OSError where its file system refuses."""
    import fcntl  # which Windows lacks

    if hasattr(os, "O_DIRECT"):
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if is_wanted else flags & ~os.O_DIRECT)
    elif hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(file, fcntl.F_NOCACHE, int(is_wanted))


def chunks(tensor: Tensor) -> list[tuple[int, int]]:
    """Return the parts of a contiguous tensor to be moved one by one, as `(address, num_bytes)`, cut at whole pages."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first = begin // PAGE * PAGE
    cuts = [begin, *range(first + CHUNK_BYTES, end, CHUNK_BYTES), end]
    return [(start, stop - start) for start, stop in pairwise(cuts) if stop > start]


def write_memory(file: int, address: int, num_bytes: int, position: int) -> None:
    """Write memory to the page of the file that begins at `position`, and on; an OSError says why it could not."""
    pages, ends = _pages(address, num_bytes)
    for own, memory in ends:
        own[:] = memory
    _move_all(os.pwritev, file, pages, position)


def read_memory(file: int, address: int, num_bytes: int, position: int) -> None:
    """Read memory back from where `write_memory` put it."""
    pages, ends = _pages(address, num_bytes)
    _move_all(os.preadv, file, pages, position)
    for own, memory in ends:
        memory[:] = own


def _pages(address: int, num_bytes: int) -> tuple[list[memoryview], list[tuple[memoryview, memoryview]]]:
    """Return whole pages that hold a piece of memory, and its ends, each as (part of our own page, memory)."""
    memory = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
    own_first, own_last = _ends.whole[:PAGE], _ends.whole[PAGE:]
    first = address % PAGE
    num_first = min(-address % PAGE, num_bytes)
    num_last = (num_bytes - num_first) % PAGE
    pages, ends = [], []
    if num_first:
        pages.append(own_first)
        ends.append((own_first[first : first + num_first], memory[:num_first]))
    if num_first + num_last < num_bytes:
        pages.append(memory[num_first : num_bytes - num_last])
    if num_last:
        pages.append(own_last)
        ends.append((own_last[:num_last], memory[num_bytes - num_last :]))
    return pages, ends


_Move = Callable[[int, list[memoryview], int], int]


def _move_all(move: _Move, file: int, pages: list[memoryview], start: int) -> None:
    """Call until all pages have been moved: the system may move fewer at a time."""
    while pages:
        moved = move(file, pages, start)
        if moved == 0:
            raise OSError(f"the file ends at byte {start}, {sum(map(len, pages))} bytes too early")
        start += moved
        while pages and moved >= len(pages[0]):
            moved -= len(pages.pop(0))
        if moved:
            pages[0] = pages[0][moved:]
