"""Copies between host and device memory, in a form that every caller can be tested with on a CPU.

A caller never touches streams or events. So a test's copier can perform each copy as early, as late or as randomly as
the rules below allow, and poison released memory.

The life of an offloaded tensor on the three streams of `StreamCopier` (`|` records an event, `->` waits for it):

compute     produce x |        forward goes on ...        -> wait | read x' in backward
to host               -> x to host |
to device                                  -> host to x' |
"""

import os
import time
from abc import abstractmethod
from collections import deque
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hf_memopt.transfer.host_memory import driver_is_gone, pinned_empty

ALIGNMENT = 16  # bytes, of the largest dtype


class Transfer(Protocol):
    """One copy under way."""

    def wait(self) -> None:
        """Order all later work of the current compute stream after the copy, and of the one that it was submitted on.

        May be called more than once, on other streams too, and raises each time if the copy has failed. When it raises,
        the copy is over.
        """


class StreamEvent(Protocol):
    """A moment of the device."""

    def query(self) -> bool:
        """Return whether it is known to be over."""

    def synchronize(self) -> None:
        """Make the host wait until it is over."""


class DeviceCopy(Transfer, Protocol):
    """A copy between device and host, which the host goes on beside; `finished` is its end."""

    @property
    def finished(self) -> StreamEvent: ...


@runtime_checkable
class Copier(Protocol):
    """Moves bytes between host and device memory.

    A copy starts after the work that the compute stream holds when it is submitted. Its source must not be written, and
    neither end released, before `Transfer.wait`. Host memory may be dropped then: the copier keeps it as long as
    needed.
    """

    bytes_to_device: int
    bytes_to_host: int

    def empty_host(self, num_bytes: int) -> Tensor:
        """Uninitialised host memory, `(num_bytes,)` uint8, perhaps a part of a larger storage."""

    def empty_device(self, num_bytes: int) -> Tensor:
        """Uninitialised device memory of the compute stream, `(num_bytes,)` uint8.

        It begins at a multiple of `ALIGNMENT` bytes of its storage, which may be larger.
        """

    def release(self, buffer: Tensor) -> None:
        """Announce that the work submitted so far is the last that reads `buffer`."""

    def to_device(self, source: Tensor, destination: Tensor) -> DeviceCopy:
        """Start copying host memory to device memory of the same shape and dtype."""

    def to_host(self, source: Tensor, destination: Tensor) -> DeviceCopy:
        """Start copying device memory to host memory of the same shape and dtype."""

    def settle(self) -> None:
        """Make the host wait for all copies, those too that an interrupt has cut off from their callers."""

    def stall_ms(self) -> float:
        """Milliseconds for which compute waited for copies, of those that have finished."""


class _OwnCopier(Copier):
    """The parts that both kinds share."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.bytes_to_device = self.bytes_to_host = 0

    def empty_device(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def release(self, buffer: Tensor) -> None:
        """Do nothing: the allocator reuses memory in the order of the compute stream."""

    def to_device(self, source: Tensor, destination: Tensor) -> DeviceCopy:
        self.bytes_to_device += source.nbytes
        return self._copy(source, destination, is_read=True)

    def to_host(self, source: Tensor, destination: Tensor) -> DeviceCopy:
        self.bytes_to_host += source.nbytes
        return self._copy(source, destination, is_read=False)

    @abstractmethod
    def _copy(self, source: Tensor, destination: Tensor, is_read: bool) -> DeviceCopy: ...


class SyncCopier(_OwnCopier):
    """Copies at once, while the host waits: on the CPU, where it is the reference for all others, or on `device`."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(device)
        self._stall_s = 0.0

    def empty_host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def settle(self) -> None:
        """Do nothing: no copy is under way."""

    def stall_ms(self) -> float:
        return 1e3 * self._stall_s

    def _copy(self, source: Tensor, destination: Tensor, is_read: bool) -> DeviceCopy:
        start = time.perf_counter()
        destination.copy_(source)
        self._stall_s += time.perf_counter() - start
        return _FINISHED


class _Finished:
    """A copy that was over before its transfer existed."""

    def wait(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    @property
    def finished(self) -> StreamEvent:
        return self


_FINISHED = _Finished()


class HostBuffersInFlight:
    """Host memory held until the queued copies of one stream are over."""

    def __init__(self) -> None:
        self._held: deque[tuple[StreamEvent, Tensor]] = deque()

    def hold(self, memory: Tensor, finished: StreamEvent) -> None:
        """Keep memory until `finished`, which comes after all that was given before."""
        self._held.append((finished, memory))

    def drop_finished(self) -> None:
        # Taken out before it is asked: a destructor or another thread may get in between.
        while self._held:
            entry = self._held.popleft()
            if not entry[0].query():
                self._held.appendleft(entry)
                return

    def wait(self) -> None:
        while self._held:
            finished, _memory = self._held.popleft()
            finished.synchronize()


class StreamCopier(_OwnCopier):
    """Copies on side streams of an accelerator, one for each direction, without ever blocking the host.

    Args:
        device: an accelerator's device, such as `cuda` or `cuda:1`.
        pin_memory: allocate page-locked host memory. Copies from and to other memory block the host.

    Destinations come from the compute stream's memory pool without `record_stream`: a copy waits for the compute
    stream, which waits for the copy before the memory can be released (`Transfer.wait`). Only memory read by another
    stream than its own is recorded there. Dropping the copier waits for its copies, since the host memory goes with it.
    """

    def __init__(self, device: torch.device | str, pin_memory: bool = True) -> None:
        self._process = os.getpid()
        self._reading, self._writing = HostBuffersInFlight(), HostBuffersInFlight()
        super().__init__(device)
        self._pin_memory = pin_memory
        self._stream_to_device = torch.Stream(self.device)
        self._stream_to_host = torch.Stream(self.device)
        self._compute: torch.Stream | None = None
        self._waits: deque[tuple[torch.Event, torch.Event]] = deque()
        self._stall_ms = 0.0

    def __del__(self) -> None:
        if not driver_is_gone(self._process):
            self._reading.wait()
            self._writing.wait()

    def empty_host(self, num_bytes: int) -> Tensor:
        # Dropped memory is given back before more is taken: the machine may not have room for both.
        self._reading.wait()
        self._writing.wait()
        if self._pin_memory:
            return pinned_empty(num_bytes, self.device)
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def settle(self) -> None:
        self._stream_to_device.synchronize()
        self._stream_to_host.synchronize()

    def stall_ms(self) -> float:
        self._drop_finished()
        # The oldest of a compute stream ends first, so that a device far behind is asked once.
        while self._waits:
            before, after = self._waits.popleft()
            if not after.query():
                self._waits.appendleft((before, after))
                break
            self._stall_ms += before.elapsed_time(after)
        return self._stall_ms

    def _copy(self, source: Tensor, destination: Tensor, is_read: bool) -> DeviceCopy:
        stream = self._stream_to_device if is_read else self._stream_to_host
        # Looked up at every use: the caller may have entered another stream since the last copy.
        compute = torch.accelerator.current_stream(self.device)
        if self._compute is None or compute != self._compute:  # `stream != None` is False, too
            self._follow(compute)
        # After the work that made its source, and the last work that used the memory of its destination.
        stream.wait_stream(compute)
        with stream:
            destination.copy_(source, non_blocking=True)
            try:
                finished = stream.record_event(torch.Event(self.device))
            except RuntimeError:
                stream.synchronize()  # there is no event that tells when the copy is over
                raise
        # The copier keeps the host's end, which its owner may drop at any time; the transfer keeps the device's.
        ends, host, memory = (self._reading, source, destination) if is_read else (self._writing, destination, source)
        self._drop_finished()
        ends.hold(host, finished)
        return _StreamTransfer(self, finished, compute, memory, is_read)

    def _drop_finished(self) -> None:
        self._reading.drop_finished()
        self._writing.drop_finished()

    def _follow(self, compute: torch.Stream) -> None:
        # The new stream has not waited for queued copies, and may be given the same memory.
        if self._compute is not None:
            self._stream_to_device.wait_stream(self._stream_to_host)
            self._stream_to_host.wait_stream(self._stream_to_device)
        self._compute = compute

    def _order_after(self, finished: torch.Event, compute: torch.Stream) -> None:
        # The two marks enclose the wait: the time between them is the stall.
        try:
            before = compute.record_event(torch.Event(self.device, enable_timing=True))
            compute.wait_event(finished)
            after = compute.record_event(torch.Event(self.device, enable_timing=True))
        except RuntimeError:
            finished.synchronize()
            raise
        self._waits.append((before, after))
        if len(self._waits) > 64:
            self.stall_ms()  # drops the pairs that have finished


class _StreamTransfer:
    """Holds the device memory of a copy until it was waited for, so that it is not freed under the copy.

    With `is_read` as long as this object: work of other streams may read it, of which the allocator has to be told.
    """

    _is_read = False

    def __init__(
        self, copier: StreamCopier, finished: torch.Event, owner: torch.Stream, memory: Tensor, is_read: bool
    ) -> None:
        self._copier, self.finished, self._owner, self._is_read = copier, finished, owner, is_read
        self._memory: Tensor | None = memory
        self._ordered: list[torch.Stream] = []

    def __del__(self) -> None:
        # An interrupt has cut it off from its caller: nothing else may get its memory before the copy is over.
        if self._is_read and not self._ordered and not driver_is_gone(self._copier._process):
            self.finished.synchronize()

    def wait(self) -> None:
        compute = torch.accelerator.current_stream(self._copier.device)
        if compute in self._ordered:
            return
        for stream in (compute, self._owner):
            if stream not in self._ordered:
                self._copier._order_after(self.finished, stream)
                self._ordered.append(stream)
        if not self._is_read:
            self._memory = None
        elif compute != self._owner:
            assert self._memory is not None
            self._memory.record_stream(compute)
