"""Copies between host and device memory, in a form that every caller can be tested with on a CPU.

A caller allocates through the copier, starts a copy, and makes the compute stream wait for it before it reads the
destination. It never touches streams or events itself, so that a test can put a copier in its place that performs each
copy as early, as late or as randomly as these rules allow and poisons what has been released.
"""

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hf_memopt.transfer.host_memory import pinned_empty


class Transfer(Protocol):
    """One copy under way."""

    def wait(self) -> None:
        """Order all later work of the current compute stream after the copy. May be called more than once."""


@runtime_checkable
class Copier(Protocol):
    """Moves bytes between host and device memory.

    A copy starts no earlier than the work that the compute stream already holds when it is submitted. Its source must
    not be written, and neither end released, before `Transfer.wait` was called.
    """

    bytes_to_device: int
    bytes_to_host: int

    def empty_host(self, num_bytes: int) -> Tensor:
        """Uninitialised host memory, `(num_bytes,)` uint8."""

    def empty_device(self, num_bytes: int) -> Tensor:
        """Uninitialised device memory that belongs to the compute stream, `(num_bytes,)` uint8."""

    def release(self, buffer: Tensor) -> None:
        """Announce that the work submitted so far is the last that reads `buffer`."""

    def to_device(self, source: Tensor, destination: Tensor) -> Transfer:
        """Start copying host memory to device memory of the same shape and dtype."""

    def to_host(self, source: Tensor, destination: Tensor) -> Transfer:
        """Start copying device memory to host memory of the same shape and dtype."""

    def stall_ms(self) -> float:
        """Milliseconds for which compute waited for copies, over those that have finished."""


class SyncCopier:
    """Copies at once, on the CPU. What a machine without an accelerator runs, and the reference for all others."""

    def __init__(self) -> None:
        self.bytes_to_device = 0
        self.bytes_to_host = 0
        self._stall_s = 0.0

    def empty_host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def empty_device(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def release(self, buffer: Tensor) -> None:
        """Nothing to do: memory returns to the allocator with its last reference."""

    def to_device(self, source: Tensor, destination: Tensor) -> Transfer:
        self.bytes_to_device += source.nbytes
        return self._copy(source, destination)

    def to_host(self, source: Tensor, destination: Tensor) -> Transfer:
        self.bytes_to_host += source.nbytes
        return self._copy(source, destination)

    def stall_ms(self) -> float:
        return 1e3 * self._stall_s

    def _copy(self, source: Tensor, destination: Tensor) -> Transfer:
        start = time.perf_counter()
        destination.copy_(source)
        self._stall_s += time.perf_counter() - start
        return _FINISHED


class _Finished:
    def wait(self) -> None:
        """The copy was over before its transfer existed."""


_FINISHED = _Finished()


class StreamCopier:
    """Copies on side streams of an accelerator, one for each direction, without ever blocking the host.

    Args:
        device: an accelerator's device, such as `cuda` or `cuda:1`.
        pin_memory: allocate page-locked host memory. Copies from and to other memory block the host.

    Destinations come from the compute stream's memory pool and go back to it. That is safe without `record_stream`
    because a copy waits for the compute stream before it starts, and the compute stream waits for the copy before the
    memory can be released (`Transfer.wait`).
    """

    def __init__(self, device: torch.device | str, pin_memory: bool = True) -> None:
        self.device = torch.device(device)
        self._pin_memory = pin_memory
        self.bytes_to_device = 0
        self.bytes_to_host = 0
        self._stream_to_device = torch.Stream(self.device)
        self._stream_to_host = torch.Stream(self.device)
        self._waits: list[tuple[torch.Event, torch.Event]] = []
        self._stall_ms = 0.0

    def empty_host(self, num_bytes: int) -> Tensor:
        if self._pin_memory:
            return pinned_empty(num_bytes, self.device)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def empty_device(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def release(self, buffer: Tensor) -> None:
        """Nothing to do: the allocator reuses memory in the order of the compute stream."""

    def to_device(self, source: Tensor, destination: Tensor) -> Transfer:
        self.bytes_to_device += source.nbytes
        return self._copy(source, destination, self._stream_to_device)

    def to_host(self, source: Tensor, destination: Tensor) -> Transfer:
        self.bytes_to_host += source.nbytes
        return self._copy(source, destination, self._stream_to_host)

    def stall_ms(self) -> float:
        unfinished = []
        for before, after in self._waits:
            if after.query():
                self._stall_ms += before.elapsed_time(after)
            else:
                unfinished.append((before, after))
        self._waits = unfinished
        return self._stall_ms

    def _copy(self, source: Tensor, destination: Tensor, stream: torch.Stream) -> Transfer:
        # The compute stream is looked up at every use: the caller may have entered another one since the last copy.
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            destination.copy_(source, non_blocking=True)
            finished = stream.record_event(torch.Event(self.device))
        return _StreamTransfer(self, finished, source, destination)

    def _order_after(self, finished: torch.Event) -> None:
        compute = torch.accelerator.current_stream(self.device)
        before = compute.record_event(torch.Event(self.device, enable_timing=True))
        compute.wait_event(finished)
        after = compute.record_event(torch.Event(self.device, enable_timing=True))
        self._waits.append((before, after))
        if len(self._waits) > 64:
            self.stall_ms()  # drops the pairs that have finished


class _StreamTransfer:
    """Holds both ends until someone has waited, so that neither is freed under the copy."""

    def __init__(self, copier: StreamCopier, finished: torch.Event, source: Tensor, destination: Tensor) -> None:
        self._copier = copier
        self._finished: torch.Event | None = finished
        self._ends: tuple[Tensor, Tensor] | None = (source, destination)

    def wait(self) -> None:
        if self._finished is not None:
            self._copier._order_after(self._finished)
            self._finished = self._ends = None


def copier_for(device: torch.device | str, pin_memory: bool = True) -> Copier:
    """The copier that suits a device: side streams on an accelerator, plain copies on the CPU."""
    device = torch.device(device)
    return MAKERS.get(device.type, StreamCopier)(device, pin_memory)


# By type of device, where it is not an accelerator with streams; a simulated device enters its own.
MAKERS: dict[str, Callable[[torch.device, bool], Copier]] = {"cpu": lambda device, pin_memory: SyncCopier()}
