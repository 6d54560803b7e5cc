"""A disk as the memory below the device.

Below a device that computes in host memory, as a CPU does, bytes go to the file and back without a copy in between.
Below any other device they stop in host memory on either way.
"""

import copy
import logging
import mmap
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_memopt.transfer.clock import Clock, measure_link
from hf_memopt.transfer.copier import ALIGNMENT, Copier, DeviceCopy, StreamEvent, Transfer
from hf_memopt.transfer.direct_io import PAGE, page_aligned, private_pages
from hf_memopt.transfer.disk_space import Extent, FileCopy, TierFile
from hf_memopt.transfer.host_arena import HostArena
from hf_memopt.transfer.lower_memory import LowerMemory
from hf_memopt.transfer.tier import Tier

logger = logging.getLogger(__name__)

# Passes after which the log tells how much is written.
_FIRST_WEAR_LINE, _WEAR_LINE_EVERY = 10, 1000


class _Disk(LowerMemory):
    """The parts that both kinds share."""

    name = "disk"

    def __init__(self, file: TierFile) -> None:
        super().__init__(file.space)
        self.file = file
        self.num_passes = 0

    def settle(self) -> None:
        self.file.settle()

    def begin_pass(self) -> None:
        self.num_passes += 1
        if self.num_passes == _FIRST_WEAR_LINE or self.num_passes % _WEAR_LINE_EVERY == 0:
            logger.info("%s", self.file.wear())


@dataclass(eq=False)
class DiskBlock:
    """An extent, how far behind the beginning of its first page the bytes begin, and the staged write that fills it."""

    extent: Extent
    nbytes: int
    offset: int = 0
    write: "_StagedWrite | None" = None


class DirectDisk(_Disk):
    """A disk below a device that computes in host memory.

    Bytes come back to the same place within a page, so that kernels which choose by alignment choose as before.
    """

    def acquire(self, num_bytes: int, storage: torch.UntypedStorage) -> DiskBlock | None:
        if storage.data_ptr() % ALIGNMENT:  # memory to read to never begins at such a place
            return None
        extent = self.file.space.acquire(num_bytes)
        return None if extent is None else DiskBlock(extent, num_bytes)

    def release(self, block: DiskBlock) -> None:
        self.file.space.release(block.extent)

    def write(self, source: Tensor, block: DiskBlock) -> FileCopy:
        block.offset = source.data_ptr() % PAGE
        return self.file.write(source, block.extent)

    def read(self, block: DiskBlock, destination: Tensor) -> FileCopy:
        return self.file.read(block.extent, destination)

    def at_home(self, block: DiskBlock) -> mmap.mmap:
        """Map the extent, in which the bytes begin at `block.offset`."""
        return self.file.mapped(block.extent)

    def empty_device(self, num_bytes: int, block: DiskBlock, first: int) -> Tensor:
        return private_pages(num_bytes, (block.offset - first) % PAGE)

    def stall_ms(self) -> float:
        return 1e3 * self.file.waited_s

    def tier(self, clock: Clock) -> Tier:
        file = self.file
        return Tier("disk", file.write_bytes_per_s, file.read_bytes_per_s, file.space.budget_bytes, wears=True)


class StagedDisk(_Disk):
    """A disk below a device with memory of its own.

    Each way is two copies. The second one starts once the first is seen to be over: at the next copy of any tensor, or
    at a wait. Tensors larger than the host memory for it, `staging_bytes`, do not go.

    After an error torch frees the graph on a thread of its own, whose destructors wait for copies, while the next step
    may have begun: `lock` is held during each look at a copy.
    """

    def __init__(self, file: TierFile, copier: Copier, staging_bytes: int, is_below_host: bool = False) -> None:
        super().__init__(file)
        self.copier, self._is_below_host = copier, is_below_host
        self.staging_bytes = staging_bytes // PAGE * PAGE
        self.staging = self._new_staging()
        # Oldest first. Each holds a block of the host memory.
        self._under_way: deque[_StagedWrite | _StagedRead] = deque()
        self._link: tuple[float, float] | None = None
        self.lock = threading.RLock()

    def acquire(self, num_bytes: int, storage: torch.UntypedStorage) -> DiskBlock | None:
        # A tensor that could not stop on its way back must not go.
        extent = self.file.space.acquire(num_bytes) if num_bytes <= self.staging_bytes else None
        return None if extent is None else DiskBlock(extent, num_bytes)

    @property
    def host_bytes_held(self) -> int:
        return self.staging.bytes_held

    @property
    def bytes_live(self) -> int:
        writes = [each for each in tuple(self._under_way) if isinstance(each, _StagedWrite)]
        return super().bytes_live - sum(write.extent.num_bytes for write in writes if write.is_abandoned)

    def release(self, block: DiskBlock) -> None:
        with self.lock:
            if block.write is None or block.write.is_over:
                self.file.space.release(block.extent)
            else:
                block.write.is_abandoned = True

    def write(self, source: Tensor, block: DiskBlock) -> Transfer:
        with self.lock:
            memory = self._take(source.nbytes)
            block.write = _StagedWrite(self, memory, block.extent, self.copier.to_host(source, memory))
            self._under_way.append(block.write)
            return block.write

    def read(self, block: DiskBlock, destination: Tensor) -> Transfer:
        with self.lock:
            self._finish_write(block)
            memory = self._take(destination.nbytes)
            read = _StagedRead(self, memory, self.file.read(block.extent, memory), destination)
            self._under_way.append(read)
            return _ReadTransfer(read)

    def settle(self) -> None:
        self.copier.settle()
        super().settle()

    def at_home(self, block: DiskBlock) -> mmap.mmap:
        with self.lock:
            self._finish_write(block)
        return self.file.mapped(block.extent)

    def empty_device(self, num_bytes: int, block: DiskBlock, first: int) -> Tensor:
        return self.copier.empty_device(num_bytes)

    def begin_pass(self) -> None:
        super().begin_pass()
        with self.lock:
            self._advance()

    def stall_ms(self) -> float:
        """Leave waits for the copier's copies to the memory above that has the same copier, if there is one."""
        copies_ms = 0.0 if self._is_below_host else self.copier.stall_ms()
        return copies_ms + 1e3 * self.file.waited_s

    def tier(self, clock: Clock) -> Tier:
        """Return the slower of link and disk, which both have a tensor at a time."""
        if self._link is None:
            self._link = measure_link(self.copier, clock)
        writes = min(self._link[0], self.file.write_bytes_per_s)
        reads = min(self._link[1], self.file.read_bytes_per_s)
        return Tier("disk", writes, reads, self.file.space.budget_bytes, wears=True)

    def _finish_write(self, block: DiskBlock) -> None:
        assert block.write is not None
        block.write.finish()
        block.write.raise_error()

    def _take(self, num_bytes: int) -> Tensor:
        """Return host memory that begins with a page; waits for the oldest copies where there is none."""
        self._advance()
        while (memory := self.staging.acquire(num_bytes)) is None:
            if self._under_way:
                self._under_way.popleft().finish()
            else:  # interrupts have cut copies off from this object
                self.copier.settle()
                self.staging = self._new_staging()
        return memory

    def _new_staging(self) -> HostArena:
        return HostArena(self.copier, self.staging_bytes, PAGE, partial(page_aligned, self.copier))

    def _advance(self) -> None:
        for each in self._under_way:
            each.advance()
        self._under_way = deque(each for each in self._under_way if not each.is_over)


class _StagedWrite:
    """The way of a tensor to the file: first `copied` to `memory` of the host, then stored."""

    def __init__(self, disk: StagedDisk, memory: Tensor, extent: Extent, copied: DeviceCopy) -> None:
        self._disk, self._memory, self.extent, self._copied = disk, memory, extent, copied
        self._of_pass = disk.num_passes
        self._stored: FileCopy | None = None
        self._error: Exception | None = None
        self.is_over = self.is_abandoned = False

    def wait(self) -> None:
        with self._disk.lock:
            self._copied.wait()
            self.raise_error()

    def raise_error(self) -> None:
        if self._error is not None:
            raise copy.copy(self._error)  # one that is raised has frames, and these keep their storages

    def advance(self) -> None:
        """Go on as far as is possible without waiting."""
        if self._stored is None and not self.is_over and self._copied.finished.query():
            self._store()
        if self._stored is not None and self._stored.is_over():
            self.finish()

    def finish(self) -> None:
        """Wait on the host until the host memory is free again; an error is kept for those who ask for the bytes."""
        if self.is_over:
            return
        try:
            self._copied.finished.synchronize()
            if self._stored is None:
                self._store()
            if self._stored is not None:
                self._stored.wait()
        except Exception as error:  # raised to the reader of the bytes; without one, at the end of a step
            self._error = error.with_traceback(None)
        self._end()

    def _store(self) -> None:
        if self.is_abandoned:
            self._end()
        else:
            self._stored = self._disk.file.write(self._memory, self.extent)

    def _end(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._disk.staging.release(self._memory)
        del self._memory  # the arena may give up its region before this object goes
        if self.is_abandoned:
            self._disk.file.space.release(self.extent)
            if self._error is not None:
                self._disk.failures.append((self._error, self._of_pass))


class _StagedRead:
    """The way of a tensor from the file: first fetched to `memory` of the host, then copied to its destination."""

    def __init__(self, disk: StagedDisk, memory: Tensor, fetched: FileCopy, destination: Tensor) -> None:
        self.disk, self._memory, self._fetched = disk, memory, fetched
        self._destination: Tensor | None = destination
        self._copied: Transfer | None = None
        self._finished: StreamEvent | None = None
        self._error: Exception | None = None
        self.is_over = False

    def copied(self) -> Transfer:
        self._copy()
        if self._error is not None:
            raise copy.copy(self._error)
        assert self._copied is not None
        return self._copied

    def forget_copied(self) -> None:
        """Leave the second copy to its only user: it has the device's memory."""
        self._copied = None

    def advance(self) -> None:
        if self._fetched.is_over():
            self._copy()
        if self._finished is not None and self._finished.query():
            self._end()

    def finish(self) -> None:
        self._copy()
        if self._finished is not None:
            self._finished.synchronize()
        self._end()

    def _copy(self) -> None:
        if self._destination is None:
            return
        try:
            self._fetched.wait()
            self._copied = self.disk.copier.to_device(self._memory, self._destination)
            self._finished = self._copied.finished
        except Exception as error:  # raised to those who wait for the bytes
            self._error = error.with_traceback(None)
            self._end()
        self._destination = None  # after an interrupt it is copied once more

    def _end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self.disk.staging.release(self._memory)
            del self._memory


class _ReadTransfer:
    """A read as its user sees it."""

    def __init__(self, read: _StagedRead) -> None:
        self._read = read
        self._copied: Transfer | None = None

    def wait(self) -> None:
        with self._read.disk.lock:
            if self._copied is None:
                self._copied = self._read.copied()
                self._read.forget_copied()
            self._copied.wait()
