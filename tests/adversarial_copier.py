"""A copier as unhelpful as the rules of `hf_memopt.transfer.Copier` allow: wrong waits and releases give NaN.

Copies happen as early, as late or as randomly as they may; memory that must not be read holds NaN bytes. Waiting orders
the device and not the host: a copy may stay queued for some operations more, and freeing host memory before it is over
is an error.
"""

import random
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memopt.transfer import Copier, SyncCopier
from hf_memopt.transfer.copier import HostBuffersInFlight

POISON = 0xFF  # NaN in every floating-point dtype
HOST_IS_AHEAD = 16  # operations, at most


class InjectedError(RuntimeError):
    """Raised in place of a chosen operation."""


class AdversarialCopier:
    """A copier that fails the `fail_at`-th operation, waits included."""

    def __init__(self, schedule: str = "late", seed: int = 0, fail_at: int | None = None) -> None:
        self.bytes_to_device = 0
        self.bytes_to_host = 0
        self.num_operations = 0
        self.live_bytes = 0
        self._schedule = schedule
        self._random = random.Random(seed)
        self._fail_at = fail_at
        self._pending: list[AdversarialTransfer] = []
        self._on_device: set[int] = set()
        self._host_ends = HostBuffersInFlight()
        self._queued: deque[tuple[Moment, StorageWeakRef]] = deque()
        self.num_reached = 0

    def empty_host(self, num_bytes: int) -> Tensor:
        self._host_ends.wait()
        return self._poisoned(num_bytes)

    def empty_device(self, num_bytes: int) -> Tensor:
        self.tick()
        self.live_bytes += num_bytes
        buffer = self._poisoned(num_bytes)
        self._on_device.add(buffer.data_ptr())
        return buffer

    def release(self, buffer: Tensor) -> None:
        for transfer in self._pending:
            for end in (transfer.source, transfer.destination):
                assert not overlap(buffer, end), "released under a copy that nobody waited for"
        if buffer.data_ptr() in self._on_device:
            self._on_device.remove(buffer.data_ptr())
            self.live_bytes -= buffer.nbytes
        buffer.fill_(POISON)

    def to_device(self, source: Tensor, destination: Tensor) -> "AdversarialTransfer":
        self.tick()
        self.bytes_to_device += source.nbytes
        return self._start(source, destination, is_to_host=False)

    def to_host(self, source: Tensor, destination: Tensor) -> "AdversarialTransfer":
        self.tick()
        self.bytes_to_host += source.nbytes
        return self._start(source, destination, is_to_host=True)

    def settle(self) -> None:
        for transfer in tuple(self._pending):
            self.perform(transfer)
        self.num_reached = self.num_operations

    def stall_ms(self) -> float:
        self._host_ends.drop_finished()
        return 0.0

    def tick(self) -> None:
        """Count one operation, and fail it in its turn."""
        self.num_operations += 1
        self._advance()
        if self.num_operations == self._fail_at:
            raise InjectedError(f"operation {self._fail_at}")
        if self._schedule == "random":
            for transfer in self._random.sample(self._pending, self._random.randint(0, len(self._pending))):
                self.perform(transfer)

    def perform(self, transfer: "AdversarialTransfer") -> None:
        if transfer in self._pending:
            self._pending.remove(transfer)
            transfer.destination.copy_(transfer.source)
            transfer.finished.moment = Moment(self)

    def pending_with(self, end: "CopyEnd") -> "AdversarialTransfer":
        return next(transfer for transfer in self._pending if transfer.finished is end)

    def waited(self, transfer: "AdversarialTransfer") -> None:
        """Note that the compute stream has waited for a copy, whose host memory is freed when it is over."""
        if transfer.has_freed_source and transfer.finished.query():
            return  # the host has seen its end before anybody waited
        host = transfer.destination if transfer.is_to_host else transfer.source
        moment = Moment(self)
        self._host_ends.hold(host, moment)
        self._queued.append((moment, StorageWeakRef(host.untyped_storage())))

    def _advance(self) -> None:
        """Advance the device: it is as far behind the host as the schedule allows."""
        lag = {"early": 0, "late": HOST_IS_AHEAD, "random": self._random.randint(0, HOST_IS_AHEAD)}[self._schedule]
        for moment, memory in self._queued:
            assert moment.query() or not memory.expired(), "host memory was freed while a copy of it may be queued"
        self.num_reached = max(self.num_reached, self.num_operations - lag)
        while self._queued and self._queued[0][0].query():
            self._queued.popleft()

    def _start(self, source: Tensor, destination: Tensor, is_to_host: bool) -> "AdversarialTransfer":
        transfer = AdversarialTransfer(self, source, destination, is_to_host)
        self._pending.append(transfer)
        if self._schedule == "early":
            self.perform(transfer)
        return transfer

    def _poisoned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two blocks share a byte."""
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


class Moment:
    """The point at which the device has done all that the host had submitted."""

    def __init__(self, copier: AdversarialCopier) -> None:
        self._copier = copier
        self._number = copier.num_operations

    def query(self) -> bool:
        return self._copier.num_reached >= self._number

    def synchronize(self) -> None:
        self._copier.num_reached = max(self._copier.num_reached, self._number)


class CopyEnd:
    """The end of a copy, which the host knows of as late as the schedule allows."""

    def __init__(self, copier: AdversarialCopier) -> None:
        self.moment: Moment | None = None
        self._copier = copier

    def query(self) -> bool:
        return self.moment is not None and self.moment.query()

    def synchronize(self) -> None:
        """Have the host wait: the copy is performed now if it is not over."""
        if self.moment is None:
            self._copier.perform(self._copier.pending_with(self))
        assert self.moment is not None
        self.moment.synchronize()


class AdversarialTransfer:
    """A copy with only a weak reference to its source, so that a source freed too early is found."""

    def __init__(self, copier: AdversarialCopier, source: Tensor, destination: Tensor, is_to_host: bool) -> None:
        self.destination = destination
        self.is_to_host = is_to_host
        self.finished = CopyEnd(copier)
        self._was_waited_for = False
        self._copier = copier
        self._weak_source = StorageWeakRef(source.untyped_storage())
        self._view = source.dtype, source.storage_offset(), source.size(), source.stride()

    @property
    def has_freed_source(self) -> bool:
        return self._weak_source.expired()

    @property
    def source(self) -> Tensor:
        assert not self.has_freed_source, "the source was freed under a copy that nobody waited for"
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak_source.cdata)
        dtype, offset, size, stride = self._view
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)

    def wait(self) -> None:
        try:
            self._copier.tick()
        finally:
            self._copier.perform(self)
        if not self._was_waited_for:
            self._was_waited_for = True
            self._copier.waited(self)


# For tests that run with every schedule of copies.
COPIERS: dict[str, Callable[[], Copier]] = {
    "sync": SyncCopier,
    "early": lambda: AdversarialCopier("early"),
    "late": lambda: AdversarialCopier("late"),
    "random": lambda: AdversarialCopier("random"),
}
