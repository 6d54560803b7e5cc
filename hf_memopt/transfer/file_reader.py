"""Blocks of bytes whose pieces lie in files: read by a few threads past the page cache, and never written.

A piece begins anywhere in its file and goes to any memory, where direct I/O moves whole pages to whole pages. So each
part is read with the pages around it to page-aligned host memory, and copied from there:

    file     |  .bytes|bytes  |byt.   |  ->  pages of the host  |  .bytes|bytes  |byt.   |  ->  destination
"""

import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from io import FileIO
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from hf_memopt.transfer.copier import Copier, DeviceCopy, StreamEvent, Transfer
from hf_memopt.transfer.direct_io import PAGE, OwnPages, bypass_page_cache, close_in_forks, page_aligned
from hf_memopt.transfer.scratch_file import REFUSALS, DiskError
from hf_memopt.transfer.storage_memory import SparePages, WholePages
from hf_memopt.transfer.threads import Call, Threads
from hf_memopt.units import MIB, format_bytes

# The most that one call reads. A multiple of a page.
PART_BYTES = 4 * MIB
_THREADS = 4
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
# On the way to a device: half of the parts are read while the others are copied.
_NUM_BUFFERS = 2 * _THREADS


_own = OwnPages(PART_BYTES)


class ReadFile:
    """A file that is read only, whose bytes must stay as they were when this object was made.

    Forks close it, and keep its mapping.

    Args:
        file: open for reading; closed with this object.
        name: of the file, for messages.
    """

    def __init__(self, file: FileIO | IO[bytes], name: str) -> None:
        self.name = name
        self._file = file
        self._cached: FileIO | IO[bytes] | None = None
        self._process = os.getpid()
        self._state = _state(file)
        found = os.fstat(file.fileno())
        self.identity = found.st_dev, found.st_ino
        self._checksums: list[int] = []
        self._lock = threading.Lock()
        self._mapped: Tensor | None = None
        self._keep(file)
        self._bypass_page_cache()

    @property
    def num_bytes(self) -> int:
        return self._state[0]

    def remember(self) -> None:
        """Read the whole file and take checksums, with which `check` can tell a new name from other bytes."""
        found = self._summed()
        self.check()
        self._checksums = found

    def check(self) -> None:
        """Raise DiskError if the file was written since it was opened, and in a fork, where it is closed.

        A file that is renamed, linked or deleted stays as it is: this object has it open. But a write whose time was
        set back leaves the same traces, so that the whole file is read again then, and has to be as `remember` saw it.
        Otherwise a check costs 3 microseconds. It says nothing about bytes that are read after it.
        """
        if os.getpid() != self._process:
            raise DiskError(f"{self.name}: process {self._process} has it open, of which this is a fork")
        if _state(self._file) == self._state:
            return
        with self._lock:
            now, then = _state(self._file), self._state
            if now[:2] != then[:2] or not self._checksums or self._summed() != self._checksums:
                raise DiskError(
                    f"{self.name}: the file was changed after it was opened, with {format_bytes(then[0])}: it "
                    f"has {format_bytes(now[0])} now; restore it and start again"
                )
            self._state = now

    def read(self, position: int, num_bytes: int, pages: Tensor) -> Tensor:
        """Read to page-aligned memory, whole pages; returns the part of it with the bytes from `position` on.

        A DiskError says that they could not be read, or that the file ends before or was changed.
        """
        try:
            return self._read(position, num_bytes, pages)
        finally:
            self.check()  # afterwards, or a write in between would go unnoticed

    def gather(self, ranges: Iterable[tuple[int, int]], memory: Tensor) -> None:
        """Read `(position, num_bytes)` ranges, one behind the other, to `(num_bytes,)` uint8 through the page cache.

        Some 3 microseconds for each range that is in the cache. The errors are those of `read`.
        """
        room, position, num_bytes = memoryview(memory.numpy()), 0, memory.nbytes
        try:
            file = self._through_cache()
            for position, num_bytes in ranges:
                while num_bytes:
                    got = os.preadv(file, [room[:num_bytes]], position)
                    if not got:
                        raise OSError(f"the file ends at byte {position}")
                    room, position, num_bytes = room[got:], position + got, num_bytes - got
        except OSError as error:
            raise self._error(position, num_bytes, error) from error
        finally:
            self.check()

    def mapped(self) -> Tensor:
        """Return the whole file as `(num_bytes,)` uint8, read from the disk as it is touched.

        What is written stays in memory of this process. A read behind the end of a file that has become shorter is a
        fault: `check` comes before each.
        """
        if self._mapped is None:
            self.check()
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE  # what may be written counts as memory otherwise
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            pages = mmap.mmap(self._file.fileno(), self.num_bytes, flags=flags, prot=protection)
            self._mapped = torch.frombuffer(pages, dtype=torch.uint8)
        return self._mapped

    def _read(self, position: int, num_bytes: int, pages: Tensor) -> Tensor:
        first = position % PAGE
        start, wanted, filled = position - first, first + num_bytes, 0
        room = memoryview(pages.numpy())[: -(-wanted // PAGE) * PAGE]
        try:
            while (got := os.preadv(self._file.fileno(), [room[filled:]], start + filled)) < wanted - filled:
                # The system may read fewer pages than it was asked for, but less than a page at the file's end alone.
                if got < PAGE:
                    raise OSError(f"the file ends at byte {start + filled + got}")
                filled += got // PAGE * PAGE
        except OSError as error:
            raise self._error(position, num_bytes, error) from error
        return pages[first:wanted]

    def _summed(self) -> list[int]:
        """Return a checksum of each part of the file."""

        def summed(start: int) -> int:
            part = self._read(start, min(PART_BYTES, self.num_bytes - start), _own.tensor)
            return zlib.crc32(part.numpy())

        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(summed, range(0, self.num_bytes, PART_BYTES)))

    def _error(self, position: int, num_bytes: int, error: OSError) -> DiskError:
        reason = os.strerror(error.errno) if error.errno is not None else str(error)
        action = f"reading {format_bytes(num_bytes)} from byte {position} on"
        return DiskError(error.errno, f"{self.name}: {action} failed: {reason}")

    def _through_cache(self) -> int:
        """Return the descriptor of the same file, open once more: the first one may go past the page cache."""
        if not hasattr(os, "O_DIRECT"):
            return self._file.fileno()
        with self._lock:
            if self._cached is None:
                self._cached = FileIO(f"/proc/self/fd/{self._file.fileno()}")
                self._keep(self._cached)
        return self._cached.fileno()

    def _keep(self, file: FileIO | IO[bytes]) -> None:
        weakref.finalize(self, file.close)
        close_in_forks(file)

    def _bypass_page_cache(self) -> None:
        try:
            bypass_page_cache(self._file.fileno())
            os.preadv(self._file.fileno(), [_own.whole[:PAGE]], 0)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise DiskError(error.errno, f"{self.name}: reading {format_bytes(PAGE)} failed: {error}") from error
            bypass_page_cache(self._file.fileno(), False)


def _state(file: FileIO | IO[bytes]) -> tuple[int, int, int]:
    """Return the size of an open file, and the times that change when its bytes do."""
    found = os.fstat(file.fileno())
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class Piece(NamedTuple):
    """Bytes of a block, or of memory to read to, from `start` on, that lie in a file from `position` on."""

    start: int
    num_bytes: int
    file: ReadFile
    position: int


class BlockInFiles:
    """A block of bytes made of pieces, in order. The bytes between pieces have no meaning.

    Attributes:
        pieces: by their first bytes.
        bytes_read: so far, without the rest of the pages around them.
        waited_s: seconds for which the host has waited for reads.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.files = list(dict.fromkeys(piece.file for piece in pieces))
        self.pieces = {piece.start: piece for piece in pieces}
        self.num_bytes = pieces[-1].start + pieces[-1].num_bytes if pieces else 0
        self.bytes_read = 0
        self.waited_s = 0.0
        self._runs = _joined(pieces)
        self._threads = Threads(_THREADS)

    def check(self) -> None:
        for file in self.files:
            file.check()

    def parts(self, start: int, num_bytes: int) -> list[Piece]:
        """Cut the bytes from `start` on into parts, each for one call to read, and count them as read.

        They are cut at whole pages of their files, and begin anew at 0.
        """
        self.check()
        found = []
        for run in self._runs:
            begin, end = max(start, run.start), min(start + num_bytes, run.start + run.num_bytes)
            ahead = run.position - run.start
            while begin < end:
                cut = min(end, ((begin + ahead) // PART_BYTES + 1) * PART_BYTES - ahead)
                found.append(Piece(begin - start, cut - begin, run.file, begin + ahead))
                begin = cut
        self.bytes_read += sum(part.num_bytes for part in found)
        return found

    def submit[T](self, function: Callable[..., T], *arguments: Any) -> Call[T]:
        read = Call(partial(function, *arguments))
        self._threads.submit(read)
        return read

    def settle(self) -> None:
        """Wait for all calls, those that an interrupt has cut off from their callers too."""
        self._threads.settle()

    def wait(self, reads: Iterable[Call[Any]]) -> None:
        begun = time.perf_counter()
        for read in reads:
            read.wait()
        self.waited_s += time.perf_counter() - begun


def staging_bytes(block_bytes: int) -> int:
    """Return the host memory of `StagedReads` of a block."""
    return _NUM_BUFFERS * (_buffer_bytes(block_bytes) + PAGE)


def _buffer_bytes(block_bytes: int) -> int:
    return min(PART_BYTES, -(-block_bytes // PAGE) * PAGE + PAGE)


class DirectReads:
    """Reads of a block to memory of the host, where the device computes in it.

    Only the memory that `memory` has returned is read to without a copy.
    """

    def __init__(self, block: BlockInFiles) -> None:
        self._block, self.settle = block, block.settle
        self.host_bytes = _THREADS * PART_BYTES
        self.spare = SparePages()
        # By the address of the block in them.
        self._whole_pages: dict[int, WholePages] = {}

    def memory(self, start: int, num_bytes: int, message: str) -> WholePages:
        """Return memory for the piece that begins at the byte `start` of the block; see `AccessGuard`."""
        made = WholePages(num_bytes, self._block.pieces[start].position % PAGE, message, self.spare)
        self._whole_pages[made.address] = made
        return made

    def read(self, start: int, destination: Tensor) -> Transfer:
        """Start reading `(num_bytes,)` uint8 from the byte `start` of the block on."""
        parts = self._block.parts(start, destination.nbytes)
        found = self._whole_pages.get(destination.data_ptr())
        if found is None:
            return _DirectRead(self._block, [self._block.submit(_read_part, part, destination) for part in parts])
        found.share_with_forks(False)
        reads = [self._block.submit(_read_in_place, part, found.pages) for part in parts]
        return _DirectRead(self._block, reads, found)


def _read_part(part: Piece, destination: Tensor) -> None:
    found = part.file.read(part.position, part.num_bytes, _own.tensor)
    ctypes.memmove(destination.data_ptr() + part.start, found.data_ptr(), part.num_bytes)


def _read_in_place(part: Piece, pages: Tensor) -> None:
    # Parts are cut at pages of the file, so that no two share one of these.
    part.file.read(part.position, part.num_bytes, pages[-(-part.start // PAGE) * PAGE :])


class _DirectRead:
    def __init__(self, block: BlockInFiles, parts: list[Call[None]], pages: WholePages | None = None) -> None:
        self._block, self._parts, self._pages = block, parts, pages

    def wait(self) -> None:
        self._block.wait(self._parts)
        if self._pages is not None:
            self._pages.share_with_forks(True)
        for part in self._parts:
            part.result()


class StagedReads:
    """Reads of a block to a device, through page-aligned host memory: a ring of buffers, each with a part.

    Parts go in the order of the reads. A buffer goes on to the next part, and a part from the file's end to the
    device's, at the next read of anything and at a wait. So no more than the ring is read ahead.
    """

    def __init__(self, block: BlockInFiles, copier: Copier) -> None:
        self._block, self._copier = block, copier
        num_bytes = _buffer_bytes(block.num_bytes)
        self._buffers = [page_aligned(copier, num_bytes) for _ in range(_NUM_BUFFERS)]
        self.host_bytes = staging_bytes(block.num_bytes)
        # With parts that were not copied yet.
        self._unfinished: dict[_StagedRead, None] = {}
        self._queued: deque[tuple[_StagedRead, Piece]] = deque()
        self._reading: deque[tuple[_StagedRead, Piece, Tensor, Call[Tensor]]] = deque()
        self._copying: deque[tuple[StreamEvent, Tensor]] = deque()
        self._free = list(self._buffers)
        self._is_changing = False

    def read(self, start: int, destination: Tensor) -> Transfer:
        """Start reading `(num_bytes,)` uint8 from the byte `start` of the block on."""
        read = _StagedRead(self, self._block.parts(start, destination.nbytes), destination)
        with self._change():
            self._queue(read)
        self._advance()
        return read

    def finish(self, read: "_StagedRead") -> None:
        """Wait on the host until the copies of a read have been submitted, or have failed."""
        self._advance()
        while read.num_left:
            if self._reading:
                self._block.wait([self._reading[0][-1]])
            else:
                self._copying[0][0].synchronize()
            self._advance()

    def settle(self) -> None:
        """Wait on the host for all reads and copies, those that an interrupt has cut off from their callers too."""
        self._advance()
        while self._unfinished:
            self.finish(next(iter(self._unfinished)))
        self._copier.settle()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Enclose changes, of which an interrupt may leave half: then all unfinished reads begin again."""
        if self._is_changing:
            self._block.settle()
            self._copier.settle()
            self._reading.clear()
            self._copying.clear()
            self._free = list(self._buffers)
            self._queued.clear()
            for read in self._unfinished:
                self._queue(read)
        self._is_changing = True
        yield
        self._is_changing = False

    def _queue(self, read: "_StagedRead") -> None:
        read.begin()
        self._queued.extend((read, part) for part in read.parts)
        if read.num_left:
            self._unfinished[read] = None

    def _advance(self) -> None:
        """Go on as far as is possible without waiting."""
        with self._change():
            while self._reading and self._reading[0][-1].done():
                self._copy_oldest()
            while self._copying and self._copying[0][0].query():
                self._free.append(self._copying.popleft()[1])
            while self._queued and self._free:
                (read, part), buffer = self._queued.popleft(), self._free.pop()
                fetched = self._block.submit(part.file.read, part.position, part.num_bytes, buffer)
                self._reading.append((read, part, buffer, fetched))

    def _copy_oldest(self) -> None:
        read, part, buffer, fetched = self._reading.popleft()
        try:
            destination = read.destination[part.start : part.start + part.num_bytes]
            copy = self._copier.to_device(fetched.result(), destination)
        except Exception as error:  # raised to those who wait for the bytes
            read.error = error
            self._free.append(buffer)
        else:
            read.copies.append(copy)
            # Not the copy itself, which has the device's memory.
            self._copying.append((copy.finished, buffer))
        read.num_left -= 1
        if not read.num_left:
            del self._unfinished[read]


class _StagedRead:
    """A read, of which `num_left` parts are still to be copied to the device."""

    def __init__(self, reads: StagedReads, parts: Sequence[Piece], destination: Tensor) -> None:
        self.parts, self.destination = parts, destination
        self._reads = reads

    def begin(self) -> None:
        """Begin, perhaps again."""
        self.num_left = len(self.parts)
        self.copies: list[DeviceCopy] = []
        self.error: Exception | None = None

    def wait(self) -> None:
        self._reads.finish(self)
        for copy in self.copies:
            try:
                copy.wait()
            except Exception as error:  # raised once all copies are over
                self.error = error
        if self.error is not None:
            raise self.error


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Join neighbours that lie in their file as they lie in the block, with less than a page in between."""
    runs: list[Piece] = []
    for piece in pieces:
        last = runs[-1] if runs else piece
        goes_on = piece.file is last.file and piece.position - last.position == piece.start - last.start
        if runs and goes_on and piece.start - last.start - last.num_bytes < PAGE:
            runs[-1] = last._replace(num_bytes=piece.start + piece.num_bytes - last.start)
        else:
            runs.append(piece)
    return runs
