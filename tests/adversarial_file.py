"""A disk as unhelpful as its rules allow: moves as early, as late or as randomly as may be, and fails when told to.

Space that was given back holds NaN bytes, memory that is read to holds them until it has been waited for, and each
extent is compared at every read with the checksum of the bytes that were written to it.
"""

import copy
import errno
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_memopt.transfer.direct_io import PAGE, chunks, private_pages, read_memory, write_memory
from hf_memopt.transfer.disk_space import Extent
from hf_memopt.transfer.scratch_file import DiskError, FileTransfer, ScratchFile
from hf_memopt.units import format_bytes

POISON = 0xFF  # NaN in every floating-point dtype
SCHEDULES = ("early", "late", "random")


class AdversarialFile(ScratchFile):
    """A file that fails the `fail_at`-th of its reads, writes and changes of length with the error `number`."""

    def __init__(
        self,
        folder: Path,
        budget_bytes: int | None = None,
        *,
        schedule: str = "late",
        seed: int = 0,
        fail_at: int | None = None,
        number: int = errno.EIO,
    ) -> None:
        self.num_operations = 0
        self._schedule, self._random = schedule, random.Random(seed)
        self._fail_at, self._number = None, number
        self._pending: list[AdversarialTransfer] = []
        self._checksums: dict[Extent, int] = {}
        super().__init__(folder, budget_bytes)
        self.num_operations = 0
        self._fail_at = fail_at
        self._release, self.space.release = self.space.release, self._poison

    def write(self, source: Tensor, extent: Extent) -> FileTransfer:
        for moving in self._pending:
            assert not overlap(moving.extent, extent), "written under a copy that nobody waited for"
        return super().write(source, extent)

    def perform(self, transfer: "AdversarialTransfer") -> None:
        if transfer in self._pending:
            self._pending.remove(transfer)
            transfer.perform()

    def moved(self, transfer: "AdversarialTransfer", memory: Tensor) -> None:
        checksum = zlib.crc32(memory.numpy())
        if transfer.is_write:
            self._checksums[transfer.extent] = checksum
        else:
            assert self._checksums[transfer.extent] == checksum, "other bytes came back than were written"

    def tick(self, action: str) -> None:
        """Count one operation, and fail it in its turn."""
        self.num_operations += 1
        if self.num_operations == self._fail_at:
            raise self._error(action, OSError(self._number, "injected"))

    def _start(self, move: Callable[..., None], verb: str, memory: Tensor, extent: Extent) -> Any:
        transfer = AdversarialTransfer(self, move is write_memory, verb, memory, extent)
        self._pending.append(transfer)
        if self._schedule == "early":
            self.perform(transfer)
        elif self._schedule == "random":
            for other in self._random.sample(self._pending, self._random.randint(0, len(self._pending))):
                self.perform(other)
        return transfer

    def _measure(self) -> tuple[float, float]:
        return 1e9, 1e9

    def _resize(self, num_bytes: int) -> None:
        self.tick(f"cannot take {format_bytes(num_bytes - self._length)} more")
        super()._resize(num_bytes)

    def _poison(self, extent: Extent) -> None:
        assert not any(overlap(moving.extent, extent) for moving in self._pending), "given back under a copy"
        self._checksums.pop(extent, None)
        poison = private_pages(extent.num_bytes)
        write_memory(self._file.fileno(), poison.fill_(POISON).data_ptr(), extent.num_bytes, extent.start)
        self._release(extent)


def overlap(one: Extent, other: Extent) -> bool:
    return one.start < other.start + other.num_bytes and other.start < one.start + one.num_bytes


class AdversarialTransfer:
    """A copy that the calling thread performs, at the latest when it is waited for."""

    def __init__(self, file: AdversarialFile, is_write: bool, verb: str, memory: Tensor, extent: Extent) -> None:
        self._file, self.is_write, self._verb, self.extent = file, is_write, verb, extent
        self._memory: Tensor | None = memory
        self._error: DiskError | None = None
        if not is_write:
            memory.fill_(POISON)

    def perform(self) -> None:
        memory = self._memory
        assert memory is not None
        try:
            self._file.tick(f"{self._verb} {format_bytes(memory.nbytes)} failed")
        except DiskError as error:
            self._error = error.with_traceback(None)
            return
        move = write_memory if self.is_write else read_memory
        first = memory.data_ptr() // PAGE * PAGE
        for address, num_bytes in chunks(memory):
            move(self._file._file.fileno(), address, num_bytes, self.extent.start + address // PAGE * PAGE - first)
        self._file.moved(self, memory)

    def is_over(self) -> bool:
        return self not in self._file._pending

    def wait(self) -> None:
        self._file.perform(self)
        self._memory = None
        if self._error is not None:
            raise copy.copy(self._error)
