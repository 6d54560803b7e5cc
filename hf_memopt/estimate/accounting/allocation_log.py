"""A log of when each storage was born and died, from which peaks and breakdowns are read off afterwards."""

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.estimate.accounting.memory_trace import Trace
from hf_memopt.estimate.accounting.pytree import device_type, tensors_in
from hf_memopt.estimate.accounting.step_phases import Phases

# What fake tensors are asked through the dispatcher, without computing anything.
_QUESTIONS = {torch.ops.prim.device.default, torch.ops.prim.layout.default}


@dataclass(slots=True)
class StorageRecord:
    """One storage, from its birth on.

    Attributes:
        num_bytes: as the allocator counts it, rounding included.
        requested_bytes: as the program asked for it.
        on_host: whether it is host memory.
        operation: which operation made it, such as "aten.mm.default".
        owner: the module that was running; "" outside of modules.
        phase: in which it was born.
        kind: what it is for, where that is known; "" for the results of operations.
        born: position in the log.
        died: position in the log; None while it lives.
    """

    num_bytes: int
    requested_bytes: int
    on_host: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    operation: str
    owner: str
    phase: str
    kind: str
    born: int
    died: int | None = None


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs every storage that operations make inside of `with ledger:`, whether tensors are fake or real.

    Args:
        counted: type of the devices whose storages are device memory; others on the CPU are host memory.
        block_bytes: allocations are rounded up to multiples of this (512 for CUDA's caching allocator).
        phases: says which phase is running.
        on_operation: called with the function, its arguments and its result after each operation.

    Attributes:
        records: all storages so far, in order of birth.
        log: (index of a record, change in bytes), in order.
        log_phases: the phase of each entry.
    """

    def __init__(
        self,
        counted: str,
        block_bytes: int,
        phases: Phases,
        on_operation: Callable[[Any, Any, Any, Any], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[StorageRecord] = []
        self.log: list[tuple[int, int]] = []
        self.log_phases: list[str] = []
        self.phases = phases
        self._counted = counted
        self._block_bytes = block_bytes
        self._on_operation = on_operation
        self._backwards: list[int] = []  # where backward passes begin
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by the storage's address

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _QUESTIONS:
            return function(*args, **(kwargs or {}))
        if self.phases.observe():
            self._backwards.append(len(self.log))
        result = function(*args, **(kwargs or {}))
        for leaf in tensors_in(result):
            self._note(leaf, function)
        if self._on_operation is not None:
            self._on_operation(function, args, kwargs, result)
        return result

    def label(self, tensors: Iterable[Any], kind: str, owner: str | None = None) -> None:
        """Say what storages are for; one that operations never showed is entered now."""
        for tensor in tensors_in(list(tensors)):
            record = self.record_of(tensor) or self._note(tensor, None)
            if record is not None:
                record.kind = kind
                record.owner = record.owner if owner is None else owner

    def record_of(self, tensor: Tensor) -> StorageRecord | None:
        """The record of a tensor's storage, if it is known."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        return None if found is None else self.records[found[0]]

    def trace(self, first_step: int) -> Trace:
        """What happened to device memory; `first_step` is a position in `log`."""
        entries = [
            (position, index, change)
            for position, (index, change) in enumerate(self.log)
            if not self.records[index].on_host
        ]
        return Trace(
            storages=tuple(index for _, index, _ in entries),
            changes=tuple(change for _, _, change in entries),
            phases=tuple(self.log_phases[position] for position, _, _ in entries),
            positions=tuple(position for position, _, _ in entries),
            first_step=sum(position < first_step for position, _, _ in entries),
        )

    def host_peak_bytes(self, first_step: int) -> int:
        """The most that tensors held in host memory from a position of `log` on."""
        held = accumulate(change if self.records[index].on_host else 0 for index, change in self.log)
        return max(itertools.islice(held, first_step, None), default=0)

    def next_backward(self, position: int) -> int | None:
        """Where in the log the first backward after a position begins."""
        later = bisect_right(self._backwards, position)
        return self._backwards[later] if later < len(self._backwards) else None

    def _note(self, tensor: Tensor, function: Any) -> StorageRecord | None:
        if device_type(tensor) not in (self._counted, "cpu"):
            return None
        storage = tensor.untyped_storage()
        address = storage._cdata
        num_bytes = storage.nbytes()
        known = self._live.get(address)
        if known is not None:
            self._resize(known[0], num_bytes)
            return self.records[known[0]]
        if num_bytes == 0:
            return None
        return self._enter(tensor, storage, address, num_bytes, function)

    def _enter(self, tensor: Tensor, storage: Any, address: int, requested: int, function: Any) -> StorageRecord:
        index = len(self.records)
        on_host = device_type(tensor) != self._counted
        record = StorageRecord(
            num_bytes=requested if on_host else self._rounded(requested),
            requested_bytes=requested,
            on_host=on_host,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            operation="" if function is None else str(function),
            owner=self.phases.module,
            phase=self.phases.name,
            kind="",
            born=len(self.log),
        )
        self.records.append(record)
        self._write(index, record.num_bytes)
        # The weak reference itself is kept here; its callback runs when the last reference to the storage goes.
        self._live[address] = index, weakref.ref(storage, lambda _: self._bury(address, index))
        return record

    def _resize(self, index: int, requested: int) -> None:
        record = self.records[index]
        if requested != record.requested_bytes:
            num_bytes = requested if record.on_host else self._rounded(requested)
            self._write(index, num_bytes - record.num_bytes)
            record.num_bytes, record.requested_bytes = num_bytes, requested

    def _bury(self, address: int, index: int) -> None:
        self._live.pop(address, None)
        record = self.records[index]
        record.died = len(self.log)
        self._write(index, -record.num_bytes)

    def _write(self, index: int, change: int) -> None:
        self.log.append((index, change))
        self.log_phases.append(self.phases.name)

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._block_bytes) * self._block_bytes
