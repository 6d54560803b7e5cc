"""A log of when each storage was born and died, in which phase of a training step and in which module.

Peaks and breakdowns are read off it afterwards.
"""

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from hf_memopt.autograd_state import in_backward
from hf_memopt.estimate.accounting.caching_allocator import MemoryTrace

SETUP, FORWARD, BACKWARD, OUTSIDE, OPTIMIZER = "setup", "forward", "backward", "outside", "optimizer"


class StepPhases:
    """Knows the running phase and module, as far as it is told; backward tells nothing, so every operation asks.

    Forward lasts from the beginning of a step, or from a module's call, until backward begins; what comes between
    backward and the optimizer, or after it (clipping, averaging), is "outside".

    Attributes:
        name: of the running phase.
        module: full name of the innermost running module; "" outside of modules.
    """

    def __init__(self) -> None:
        self.name = SETUP
        self._running: list[str] = []
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []

    @property
    def module(self) -> str:
        return self._running[-1] if self._running else ""

    def add_root(self, module: nn.Module, prefix: str = "") -> None:
        """Name a module and all in it; what is known already keeps its name."""
        self._roots.append(module)  # keeps ids from being reused
        for name, child in module.named_modules():
            full = ".".join(part for part in (prefix, name) if part)
            self._names.setdefault(id(child), full or type(module).__name__)

    def begin_step(self) -> None:
        """Note that a step begins, with its forward pass."""
        self.name = FORWARD

    def knows(self, module: nn.Module) -> bool:
        """Return whether a module belongs to a root."""
        return id(module) in self._names

    def enter(self, module: nn.Module) -> None:
        """Note that a module begins to run: a forward pass, unless backward runs a checkpointed region again."""
        self._running.append(self._names[id(module)])
        if self.name in (BACKWARD, OUTSIDE) and not in_backward():
            self.name = FORWARD

    def leave(self) -> None:
        """Note that the innermost module has returned, or raised."""
        self._running.pop()

    def observe(self) -> bool:
        """Look whether backward runs, which begins and ends without telling; return whether it begins here.

        Called before each operation.
        """
        if self.name == OPTIMIZER:
            return False
        before = self.name
        if in_backward():
            self.name = BACKWARD
        elif self.name == BACKWARD:
            self.name = OUTSIDE
        return self.name == BACKWARD != before


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


class AllocationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs every storage that operations make inside of `with log:`, whether tensors are fake or real.

    Args:
        counted: type of the devices whose storages are device memory; others on the CPU are host memory.
        block_bytes: allocations are rounded up to multiples of this (512 for CUDA's caching allocator).
        phases: says which phase is running.
        observe: called after each operation with the function, its arguments, its result and the running phase.

    Attributes:
        records: all storages so far, in order of birth.
        log: (index of a record, change in bytes), in order.
        change_phases: the phase of each entry.
    """

    def __init__(
        self,
        counted: str,
        block_bytes: int,
        phases: StepPhases,
        observe: Callable[[Any, Any, Any, Any, str], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[StorageRecord] = []
        self.changes: list[tuple[int, int]] = []
        self.change_phases: list[str] = []
        self.phases = phases
        self._counted = counted
        self._block_bytes = block_bytes
        self._observe = observe
        self._backwards: list[int] = []  # where backward passes begin
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by the storage's address

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _QUESTIONS:
            return function(*args, **(kwargs or {}))
        if self.phases.observe():
            self._backwards.append(len(self.changes))
        result = function(*args, **(kwargs or {}))
        for leaf in tensors_in(result):
            self._note(leaf, function)
        if self._observe is not None:
            self._observe(function, args, kwargs, result, self.phases.name)
        return result

    def label(self, tensors: Iterable[Any], kind: str, owner: str | None = None) -> None:
        """Say what storages are for; one that operations never showed is entered now."""
        for tensor in tensors_in(list(tensors)):
            record = self.record_of(tensor) or self._note(tensor, None)
            if record is not None:
                record.kind = kind
                record.owner = record.owner if owner is None else owner

    def enter_block(self, num_bytes: int, kind: str, owner: str, *, stays: bool) -> None:
        """Note device memory that no tensor holds, and unless it stays, that it is given back at once."""
        record = StorageRecord(
            num_bytes=self._rounded(num_bytes),
            requested_bytes=num_bytes,
            on_host=False,
            shape=(num_bytes,),
            dtype=torch.uint8,
            operation="",
            owner=owner,
            phase=self.phases.name,
            kind=kind,
            born=len(self.changes),
        )
        self.records.append(record)
        self._write(len(self.records) - 1, record.num_bytes)
        if not stays:
            record.died = len(self.changes)
            self._write(len(self.records) - 1, -record.num_bytes)

    def record_of(self, tensor: Tensor) -> StorageRecord | None:
        """Return the record of a tensor's storage, if it is known."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        return None if found is None else self.records[found[0]]

    def trace(self, first_step: int) -> MemoryTrace:
        """Return what happened to device memory; `first_step` is a position in `log`."""
        entries = [
            (position, index, change)
            for position, (index, change) in enumerate(self.changes)
            if not self.records[index].on_host
        ]
        return MemoryTrace(
            storages=tuple(index for _, index, _ in entries),
            changes=tuple(change for _, _, change in entries),
            phases=tuple(self.change_phases[position] for position, _, _ in entries),
            positions=tuple(position for position, _, _ in entries),
            first_step=sum(position < first_step for position, _, _ in entries),
            in_blocks=self._counted != "cpu",
        )

    def host_peak_bytes(self, first_step: int) -> int:
        """Return the most that tensors held in host memory from a position of `log` on."""
        held = accumulate(change if self.records[index].on_host else 0 for index, change in self.changes)
        return max(itertools.islice(held, first_step, None), default=0)

    def next_backward(self, position: int) -> int | None:
        """Return where in the log the first backward after a position begins."""
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
            born=len(self.changes),
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
        record.died = len(self.changes)
        self._write(index, -record.num_bytes)

    def _write(self, index: int, change: int) -> None:
        self.changes.append((index, change))
        self.change_phases.append(self.phases.name)

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._block_bytes) * self._block_bytes


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries, as operations take and return them."""
    if isinstance(value, Tensor):
        yield from _with_memory(value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _with_memory(tensor: Any) -> Iterator[Tensor]:
    """The tensor, or those that it is made of: quantised optimizer states, say, have no memory of their own."""
    if type(tensor) is not FakeTensor and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _with_memory(getattr(tensor, name))
    else:
        yield tensor


def device_type(tensor: Tensor) -> str:
    """Return the type of a tensor's device; asking a fake tensor for `device` would be an operation of its own."""
    device = getattr(tensor, "fake_device", None) or tensor.device
    return str(device.type)
