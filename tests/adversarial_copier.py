"""A copier that is as unhelpful as the rules of `hf_memopt.transfer.Copier` allow.

Copies happen as early, as late or as randomly as they may; memory that nobody may read holds NaN bytes. Whoever forgets
to wait, or releases too early, computes NaN instead of being lucky.
"""

import random

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

POISON = 0xFF  # NaN in every floating-point dtype


class InjectedError(RuntimeError):
    """Raised by the copier in place of the operation that it was told to fail."""


class AdversarialCopier:
    """Fails the `fail_at`-th operation; waits count among them unless `waits_fail` is off."""

    def __init__(
        self, schedule: str = "late", seed: int = 0, fail_at: int | None = None, waits_fail: bool = True
    ) -> None:
        self.bytes_to_device = 0
        self.bytes_to_host = 0
        self.num_operations = 0
        self.live_bytes = 0
        self._schedule = schedule
        self._random = random.Random(seed)
        self._fail_at = fail_at
        self._waits_fail = waits_fail
        self._pending: list[AdversarialTransfer] = []
        self._on_device: set[int] = set()

    def empty_host(self, num_bytes: int) -> Tensor:
        return self._poisoned(num_bytes)

    def empty_device(self, num_bytes: int) -> Tensor:
        self.tick()
        self.live_bytes += num_bytes
        buffer = self._poisoned(num_bytes)
        self._on_device.add(buffer.data_ptr())
        return buffer

    def release(self, buffer: Tensor) -> None:
        for transfer in self._pending:
            ends = {end.untyped_storage().data_ptr() for end in (transfer.source, transfer.destination)}
            assert buffer.untyped_storage().data_ptr() not in ends, "released under a copy that nobody waited for"
        if buffer.data_ptr() in self._on_device:
            self._on_device.remove(buffer.data_ptr())
            self.live_bytes -= buffer.nbytes
        buffer.fill_(POISON)

    def to_device(self, source: Tensor, destination: Tensor) -> "AdversarialTransfer":
        self.tick()
        self.bytes_to_device += source.nbytes
        return self._start(source, destination)

    def to_host(self, source: Tensor, destination: Tensor) -> "AdversarialTransfer":
        self.tick()
        self.bytes_to_host += source.nbytes
        return self._start(source, destination)

    def stall_ms(self) -> float:
        return 0.0

    def tick(self) -> None:
        """Count one operation, and fail it if it is the one."""
        self.num_operations += 1
        if self.num_operations == self._fail_at:
            raise InjectedError(f"operation {self._fail_at}")
        if self._schedule == "random":
            for transfer in self._random.sample(self._pending, self._random.randint(0, len(self._pending))):
                self.perform(transfer)

    def perform(self, transfer: "AdversarialTransfer") -> None:
        if transfer in self._pending:
            self._pending.remove(transfer)
            transfer.destination.copy_(transfer.source)

    def _start(self, source: Tensor, destination: Tensor) -> "AdversarialTransfer":
        transfer = AdversarialTransfer(self, source, destination)
        self._pending.append(transfer)
        if self._schedule == "early":
            self.perform(transfer)
        return transfer

    def _poisoned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)


class AdversarialTransfer:
    """Holds its source by a weak reference only: who frees it before waiting is caught when the copy runs."""

    def __init__(self, copier: AdversarialCopier, source: Tensor, destination: Tensor) -> None:
        self.destination = destination
        self._copier = copier
        self._weak_source = StorageWeakRef(source.untyped_storage())
        self._view = source.dtype, source.storage_offset(), source.size(), source.stride()

    @property
    def source(self) -> Tensor:
        assert not self._weak_source.expired(), "the source was freed under a copy that nobody waited for"
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak_source.cdata)
        dtype, offset, size, stride = self._view
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)

    def wait(self) -> None:
        if self._copier._waits_fail:
            self._copier.tick()
        self._copier.perform(self)
