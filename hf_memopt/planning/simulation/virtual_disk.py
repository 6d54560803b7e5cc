"""The disk of a simulated run, whose copies take time and move nothing, and the compiled parts of DeepSpeed."""

import mmap
import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from hf_memopt.planning.accounting.allocation_log import StepPhases
from hf_memopt.planning.cards.memory_below import Disk
from hf_memopt.planning.simulation.virtual_time import VirtualClock, VirtualQueue, VirtualTransfer
from hf_memopt.transfer.direct_io import PAGE
from hf_memopt.transfer.disk_space import DiskSpace, Extent
from hf_memopt.units import format_bytes


class VirtualFile:
    """A file that only counts its bytes. Writes queue by file, reads in the queue of the whole disk."""

    def __init__(self, disk: "VirtualDisk", budget_bytes: int | None) -> None:
        self.space = DiskSpace(PAGE, self._note_length, budget_bytes)
        self.peak_bytes = self.bytes_written = 0
        self.waited_s = 0.0  # the clock counts it, among the time for which compute waits
        self.write_bytes_per_s = self.read_bytes_per_s = disk.bytes_per_s
        self._disk, self._writes = disk, VirtualQueue(disk.clock, disk.bytes_per_s)

    def write(self, source: Tensor, extent: Extent) -> VirtualTransfer:
        self.bytes_written += extent.num_bytes
        self._disk.note(extent.num_bytes)
        return self._writes.copy(extent.num_bytes)

    def read(self, extent: Extent, destination: Tensor) -> VirtualTransfer:
        return self._disk.reads.copy(extent.num_bytes)

    def mapped(self, extent: Extent) -> mmap.mmap:
        raise RuntimeError("a simulated disk has no bytes that could be mapped")

    def settle(self) -> None: ...

    def wear(self) -> str:
        return f"simulated disk: {format_bytes(self.bytes_written)} written"

    def _note_length(self, num_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, num_bytes)


class VirtualDisk:
    """The disk of a simulated run: an offloader's file, files of engines, bytes written step by step, and all reads.

    Without a disk of the machine, offloaders that name a folder get one of the default speed, of the size they allow,
    and files of weights are read at that speed. `step_written` are the bytes of the newest step, by phase.
    """

    def __init__(self, clock: VirtualClock, limits: Disk | None, phases: StepPhases | None = None) -> None:
        self.clock, self._limits, self.phases = clock, limits, phases or StepPhases()
        self.bytes_per_s = (limits or Disk()).bytes_per_s
        self.reads, self._writes = (VirtualQueue(clock, self.bytes_per_s) for _ in range(2))
        self._file: VirtualFile | None = None
        self._of_engines: dict[str, int] = {}
        self.step_written: Counter[str] = Counter()

    def open_file(self, folder: str | os.PathLike[str] | None, budget_bytes: int | None) -> VirtualFile | None:
        if self._file is None and (self._limits is not None or folder is not None):
            self._file = VirtualFile(self, self._limits.num_bytes if self._limits else budget_bytes)
        return self._file

    def write(self, path: str, num_bytes: int) -> VirtualTransfer:
        """Write a whole file of an engine's."""
        self._of_engines[path] = num_bytes
        self.note(num_bytes)
        return self._writes.copy(num_bytes)

    def begin_step(self) -> None:
        self.step_written = Counter()

    def note(self, num_bytes: int) -> None:
        self.step_written[self.phases.name] += num_bytes

    @property
    def peak_bytes(self) -> int:
        return (self._file.peak_bytes if self._file else 0) + sum(self._of_engines.values())


class CpuAdam:
    """The functions of DeepSpeed's compiled Adam: they take time, and their results have no values.

    Source: `adam_update` of deepspeed/ops/csrc/adam/cpu_adam_impl.cpp, in one pass over weights, gradients and moments.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def create_adam(self, *options: Any) -> None: ...

    def destroy_adam(self, number: int) -> None: ...

    def adam_update(self, number: int, step: int, *given: Any) -> None:
        weight, gradient, *moments = (each for each in given if isinstance(each, Tensor))
        written = [weight, *moments]
        self._clock.work_on_host(gradient.nbytes + 2 * sum(each.nbytes for each in written))


class AioHandle:
    """The functions of DeepSpeed's asynchronous files (`deepspeed/ops/csrc/aio`): they take a disk's time."""

    def __init__(self, disk: VirtualDisk) -> None:
        self._disk = disk
        self._pending: list[VirtualTransfer] = []

    def is_pinned(self, tensor: Tensor) -> bool:
        return True

    def new_cpu_locked_tensor(self, num_elements: int, like: Tensor) -> Tensor:
        return torch.empty(num_elements, dtype=like.dtype)

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        self._pending.append(self._disk.reads.copy(buffer.nbytes))
        return 0

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        self._pending.append(self._disk.write(path, buffer.nbytes))
        return 0

    def wait(self) -> int:
        """Make the host wait for all that was begun; return how many there were."""
        ended = len(self._pending)
        for transfer in self._pending:
            self._disk.clock.hold_host(transfer.ended_s)
        self._pending.clear()
        return ended
