"""A nameless file in a folder of the user's: it holds bytes of one process and goes with it, however that ends."""

import copy
import errno
import functools
import logging
import mmap
import os
import re
import tempfile
import time
import weakref
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import IO, NamedTuple

from torch import Tensor
from torch._logging._internal import warning_once

from hf_memopt.transfer.clock import SecondsClock, bytes_per_s
from hf_memopt.transfer.direct_io import (
    PAGE,
    bypass_page_cache,
    chunks,
    close_in_forks,
    private_pages,
    read_memory,
    write_memory,
)
from hf_memopt.transfer.disk_space import DiskSpace, Extent
from hf_memopt.transfer.threads import Call, Threads
from hf_memopt.units import MIB, format_bytes

logger = logging.getLogger(__name__)

_THREADS = 4
_PROBE_BYTES = 16 * MIB
_PROBES = 3
# Answers of file systems that have no direct I/O.
REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_MOUNTS = Path("/proc/self/mounts")
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_ON_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "fuse.sshfs"}

# Moves a piece of memory, given as address and bytes, from or to a position of a file.
_Move = Callable[[int, int, int, int], None]


class DiskError(OSError):
    """The file of the disk tier could not be made, lengthened, read or written; the message names folder and bytes."""


class FileTransfer:
    """A copy between memory and the file, in parts that several threads move; each part under way has the memory."""

    def __init__(self, file: "ScratchFile", parts: list[Call[None]]) -> None:
        self._file, self._parts = file, parts

    def is_over(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        """Wait until all parts are over; a DiskError, the same each time, if one of them failed."""
        self._file.check_process()
        if not self.is_over():
            begun = time.perf_counter()
            for part in self._parts:
                part.wait()
            self._file.waited_s += time.perf_counter() - begun
        for part in self._parts:
            error = part.exception()
            if error is not None:
                raise copy.copy(error) from error.__cause__  # the traceback would keep the caller's frames


class DiskHoldings(NamedTuple):
    """Bytes that the files of this process hold, and that it has written to them so far."""

    num_bytes: int
    num_bytes_written: int


class ScratchFile:
    """An unlinked file, read and written by a few threads past the page cache.

    The system frees its space once no process has it open. Forks close it, so that data workers which outlive a killed
    process hold no space. Making one writes 64 MiB, to measure the disk.

    Args:
        folder: an existing folder on a local disk. A file system in memory or on a network is named in a warning, as is
            one without direct I/O, where the page cache is used.
        budget_bytes: length of the file at most; None, no limit.

    Raises:
        DiskError: there can be no file in the folder.

    Attributes:
        bytes_written: in whole pages.
        is_direct: whether it is read and written past the page cache.
        write_bytes_per_s: measured once, with 16 MiB at a time; `read_bytes_per_s` likewise.
    """

    def __init__(self, folder: str | os.PathLike[str], budget_bytes: int | None = None) -> None:
        self.folder = Path(folder)
        if not hasattr(os, "preadv"):
            raise DiskError(None, f"disk={folder}: needs Linux or macOS, whose Python can read a file into memory")
        self.waited_s = 0.0
        self._process = os.getpid()
        self._length = self.bytes_written = 0
        try:
            self._file = nameless_file(self.folder)
        except OSError as error:
            raise self._error("cannot make a file", error) from error
        self._threads = Threads(_THREADS)
        weakref.finalize(self, self._file.close)  # each transfer keeps this object, so that none is under way
        close_in_forks(self._file)
        _open_files.add(self)
        warn_of_file_system(self.folder)
        self.is_direct = self._bypass_page_cache()
        self.write_bytes_per_s, self.read_bytes_per_s = self._measure()
        self.bytes_written = 0
        self._begun_s = time.monotonic()
        self.space = DiskSpace(PAGE, self._resize, budget_bytes)

    def write(self, source: Tensor, extent: Extent) -> FileTransfer:
        """Start writing contiguous host memory, which can be read back to the same place within a page."""
        self.bytes_written += extent.num_bytes
        return self._start(write_memory, "writing", source, extent)

    def read(self, extent: Extent, destination: Tensor) -> FileTransfer:
        return self._start(read_memory, "reading", destination, extent)

    def mapped(self, extent: Extent) -> mmap.mmap:
        """Map an extent to read and write: it takes page cache alone, and keeps the file's space while it lives."""
        self.check_process()
        return mmap.mmap(self._file.fileno(), extent.num_bytes, offset=extent.start)

    def settle(self) -> None:
        """Wait for all reads and writes, those that an interrupt has cut off from their callers too."""
        self._threads.settle()

    def summary(self) -> str:
        speeds = f"writes {self.write_bytes_per_s / 1e9:.1f} GB/s, reads {self.read_bytes_per_s / 1e9:.1f} GB/s"
        return f"disk={self.folder}: a file on {file_system(self.folder) or 'an unknown file system'}, {speeds}"

    def wear(self) -> str:
        """Return the bytes written, and in a day at this rate: drives are rated for some hundred TB in their life."""
        elapsed_s = time.monotonic() - self._begun_s
        terabytes = self.bytes_written / elapsed_s * 86_400 / 1e12
        written = f"{format_bytes(self.bytes_written)} written in {elapsed_s:.0f} s"
        return f"disk={self.folder}: {written}, {terabytes:.2f} TB per day at this rate"

    def check_process(self) -> None:
        """Raise DiskError in a fork, where the file is closed."""
        if os.getpid() != self._process:
            raise DiskError(f"disk={self.folder}: the file belongs to process {self._process}, of which this is a fork")

    def _start(self, move: _Move, verb: str, memory: Tensor, extent: Extent) -> FileTransfer:
        self.check_process()
        first, num_bytes = memory.data_ptr() // PAGE * PAGE, memory.nbytes

        def move_part(memory: Tensor, address: int, part_bytes: int) -> None:
            try:
                move(self._file.fileno(), address, part_bytes, extent.start + address // PAGE * PAGE - first)
            except OSError as error:
                raise self._error(f"{verb} {format_bytes(num_bytes)} failed", error) from error

        calls = [Call(functools.partial(move_part, memory, *chunk)) for chunk in chunks(memory)]
        for call in calls:
            self._threads.submit(call)
        return FileTransfer(self, calls)

    def _resize(self, num_bytes: int) -> None:
        more_bytes = num_bytes - self._length
        try:
            if more_bytes > 0 and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), self._length, more_bytes)
            else:
                os.ftruncate(self._file.fileno(), num_bytes)
        except OSError as error:
            raise self._error(f"cannot take {format_bytes(more_bytes)} more", error) from error
        self._length = num_bytes

    def _bypass_page_cache(self) -> bool:
        page = private_pages(PAGE)
        try:
            bypass_page_cache(self._file.fileno())
            write_memory(self._file.fileno(), page.data_ptr(), PAGE, 0)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise self._error(f"writing {format_bytes(PAGE)} failed", error) from error
            bypass_page_cache(self._file.fileno(), False)
            warning_once(
                logger,
                f"disk={self.folder}: the file system has no direct I/O, so bytes pass through the page cache, which "
                "takes time and memory of its own",
            )
            return False
        return True

    def _measure(self) -> tuple[float, float]:
        self._resize(_PROBE_BYTES)
        memory, whole = private_pages(_PROBE_BYTES), Extent(0, _PROBE_BYTES, _PROBE_BYTES)
        speed = functools.partial(
            bytes_per_s, num_bytes=_PROBE_BYTES, clock=SecondsClock(time.perf_counter), repeats=_PROBES
        )
        speeds = speed(lambda: self.write(memory, whole)), speed(lambda: self.read(whole, memory))
        self._resize(0)
        return speeds

    def _error(self, action: str, error: OSError) -> DiskError:
        reason = os.strerror(error.errno) if error.errno is not None else str(error)
        remedy = "; free space there or name another folder" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        held = f", with {format_bytes(self._length)} in the file" if self._length else ""
        return DiskError(error.errno, f"disk={self.folder}: {action}{held}: {reason}{remedy}")


def disk_of_process() -> DiskHoldings:
    return DiskHoldings(sum(file._length for file in _open_files), sum(file.bytes_written for file in _open_files))


def check_disk(disk: str | os.PathLike[str] | None, disk_budget_gib: float | None = None) -> None:
    """Refuse a disk that is no folder, and a budget without a disk."""
    if disk is not None and not os.path.isdir(disk):
        raise ValueError(f"disk={os.fspath(disk)!r} is no folder; name one on a local disk with room to spare")
    if disk is None and disk_budget_gib is not None:
        raise ValueError(f"disk_budget_gib={disk_budget_gib} needs disk, the folder that it is for")


def open_scratch_file(folder: str | os.PathLike[str] | None, budget_bytes: int | None) -> ScratchFile | None:
    """Return a new file in a folder, and log its speed, or None without a folder."""
    if folder is None:
        return None
    file = ScratchFile(folder, budget_bytes)
    logger.info("%s", file.summary())
    return file


def file_system(folder: Path) -> str:
    """Return the kind of file system that a folder lies on, such as `ext4`; empty where the system does not say."""
    path, kind, longest = folder.resolve(), "", 0
    for line in _MOUNTS.read_text().splitlines() if _MOUNTS.exists() else ():
        _, place, its_kind, *_ = line.split(" ")
        place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), place)  # spaces are octal numbers
        # Of several at one place the last one mounted counts.
        if path.is_relative_to(place) and len(place) >= longest:
            kind, longest = its_kind, len(place)
    return kind


def default_disk() -> str:
    """Return the system's folder for temporary files, or the present one where that lies in memory."""
    folder = tempfile.gettempdir()
    return os.getcwd() if file_system(Path(folder)) in _IN_MEMORY else folder


def nameless_file(folder: Path) -> FileIO | IO[bytes]:
    """Make a file that is gone once no process has it open; an OSError where the folder can have none."""
    return tempfile.TemporaryFile(dir=folder, prefix="hf_memopt-", buffering=0)


_open_files: "weakref.WeakSet[ScratchFile]" = weakref.WeakSet()


def warn_of_file_system(folder: Path) -> None:
    """Warn, once, of a folder in memory or on a network."""
    kind = file_system(folder)
    if kind in _IN_MEMORY:
        place = f"{kind}, which is host memory: nothing is saved"
    elif kind in _ON_NETWORK:
        place = f"a network ({kind}), and every step waits for it"
    else:
        return
    warning_once(logger, f"disk={folder} lies on {place}. Name a folder on a local disk")
