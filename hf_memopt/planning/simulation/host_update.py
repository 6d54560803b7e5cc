"""Stand-ins for the compiled parts of DeepSpeed in a simulation: its Adam on the host and its asynchronous files."""

from typing import Any

import torch
from torch import Tensor

from hf_memopt.planning.simulation.virtual_disk import VirtualDisk
from hf_memopt.planning.simulation.virtual_time import VirtualClock, VirtualTransfer


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
