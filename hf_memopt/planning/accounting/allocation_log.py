"""The log of a simulated step: when each storage is born and dies, in which phase and in which module."""

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.autograd_state import in_backward
from hf_memopt.planning.accounting.caching_allocator import MemoryTrace
from hf_memopt.planning.accounting.operation import Operation, device_kind, name_of, tensors_in
from hf_memopt.weights.gradients import AwayGradient

SETUP, FORWARD, BACKWARD, OUTSIDE, OPTIMIZER = "setup", "forward", "backward", "between passes", "optimizer"
# Of text that is then trained on; the simulation runs a few of its tokens, which tell no times.
GENERATION = "generation"


@dataclass(slots=True)
class StorageRecord:
    """One storage, from its birth on."""

    num_bytes: int  # as the allocator counts it, rounding included
    requested_bytes: int  # as the program asked for it
    on_host: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    operation: str  # that made it, such as "aten.mm.default"
    owner: str  # the module that was running; "" outside of modules
    phase: str
    kind: str  # its use, where that is known; "" for the results of operations
    born: int  # position where it is allocated
    died: int | None = None  # position where it is freed; None while it is allocated
    source: int | None = None  # index of the storage that it was made from, where no module was running
    stream: int = 0  # number of the stream for which it was allocated; 0, the first one


class Change(NamedTuple):
    """One change of memory."""

    storage: int  # index of the record
    num_bytes: int  # by which it grew; negative when it shrank or died
    phase: str
    place: str  # the module, or the weight, for which work was being done; "" where it is unknown


@dataclass
class AllocationHistory:
    """All storages of a simulation, and all changes of memory. A position is the number of changes before it."""

    in_blocks: bool  # whether CUDA's allocator hands the memory out; else allocations are exact
    records: list[StorageRecord] = field(default_factory=list)  # all storages so far, in order of birth
    changes: list[Change] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)  # positions at which backward passes begin
    step_begins: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.changes)

    def trace(self) -> MemoryTrace:
        positions = tuple(at for at, change in enumerate(self.changes) if not self.records[change.storage].on_host)
        changes = [self.changes[position] for position in positions]
        return MemoryTrace(
            storages=tuple(change.storage for change in changes),
            changes=tuple(change.num_bytes for change in changes),
            phases=tuple(change.phase for change in changes),
            positions=positions,
            first_step=sum(position < self.step_begins[0] for position in positions),
            in_blocks=self.in_blocks,
            streams={index: record.stream for index, record in enumerate(self.records) if record.stream},
        )

    def host_bytes(self) -> int:
        return sum(record.num_bytes for record in self.records if record.on_host and record.died is None)

    def host_peak_bytes(self) -> int:
        held = accumulate(change.num_bytes if self.records[change.storage].on_host else 0 for change in self.changes)
        return max(itertools.islice(held, self.step_begins[0], None), default=0)

    def next_backward(self, position: int) -> int | None:
        later = bisect_right(self.backwards, position)
        return self.backwards[later] if later < len(self.backwards) else None


class StepPhases:
    """Knows the running phase and module, as far as it is told; backward tells nothing, so every operation asks.

    Forward lasts from the beginning of a step, or from a module's call, until backward begins; code between backward
    and the optimizer, or after it (clipping, averaging), is "between passes".
    """

    def __init__(self) -> None:
        self.name = SETUP
        self.stream = 0
        self._running: list[str] = []
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []
        # The number of autograd's nodes from which on each module was running.
        self._node_numbers: list[int] = []
        self._node_modules: list[str] = []

    @property
    def module(self) -> str:
        return self._running[-1] if self._running else ""

    def add_root(self, module: nn.Module, prefix: str = "") -> None:
        self._roots.append(module)  # keeps ids from being reused
        for name, child in module.named_modules():
            full = ".".join(part for part in (prefix, name) if part)
            self._names.setdefault(id(child), full or type(module).__name__)

    def begin_step(self) -> None:
        self.name = FORWARD

    def named(self, name: str) -> AbstractContextManager[Any]:
        return patch.object(self, "name", name)

    def knows(self, module: nn.Module) -> bool:
        return id(module) in self._names

    def enter(self, module: nn.Module) -> None:
        """Note that a module begins: a forward pass, unless backward runs a checkpointed region again."""
        self._running.append(self._names[id(module)])
        self._note_nodes()
        if self.name in (BACKWARD, OUTSIDE) and not in_backward():
            self.name = FORWARD

    def leave(self) -> None:
        self._running.pop()
        self._note_nodes()

    def module_of(self, node_number: int) -> str:
        found = bisect_right(self._node_numbers, node_number) - 1
        return self._node_modules[found] if found >= 0 else ""

    def _note_nodes(self) -> None:
        self._node_numbers.append(torch._C._autograd._get_sequence_nr())
        self._node_modules.append(self.module)

    def observe(self) -> bool:
        """Look, before an operation, whether backward runs, and return whether it begins here."""
        if self.name == OPTIMIZER:
            return False
        before = self.name
        if in_backward():
            self.name = BACKWARD
        elif self.name == BACKWARD:
            self.name = OUTSIDE
        return self.name == BACKWARD != before


# Classes of tensors whose operations run on the tensors that they wrap.
_OPENED = (DTensor, AwayGradient)
# Questions that go through the dispatcher, without computing anything.
_DEVICE, _LAYOUT = torch.ops.prim.device.default, torch.ops.prim.layout.default


class AllocationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs every storage that operations make inside of `with log:`, whether tensors are fake or real.

    Args:
        counted: type of the devices whose storages are device memory; others on the CPU are host memory.
        block_bytes: allocations are rounded up to multiples of this (512 for CUDA's caching allocator).
        observe: called after each operation with it and the running phase.
    """

    def __init__(
        self,
        counted: str,
        block_bytes: int,
        phases: StepPhases,
        observe: Callable[[Operation, str], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.history = AllocationHistory(in_blocks=counted != "cpu")
        self.phases = phases
        self._counted = counted
        self._block_bytes = block_bytes
        self._observe = observe
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by the storage's address
        self._place = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled in a simulation, and torch's guard against compiling takes time."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Half of all that is dispatched asks for a device, and each mode below costs time.
        if function is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if function is _DEVICE or function is _LAYOUT:
            return function(*args, **(kwargs or {}))
        if any(each is not FakeTensor and issubclass(each, _OPENED) for each in types):
            return NotImplemented  # its own operations, on the tensors inside, are to be seen
        if self.phases.observe():
            self.history.backwards.append(self.history.position)
        self._place = self._running_place()
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        operation = Operation.of(function, args, kwargs, result)
        for number, leaf in enumerate(operation.outputs):
            self._note(leaf, function, None if self._place else self._source(args, number))
        if self._observe is not None:
            self._observe(operation, self.phases.name)
        return result

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Note also resizes of storages, which are no operations: FSDP2 frees weights so."""
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, num_bytes: int) -> None:
            resize(storage, num_bytes)
            if storage._cdata in self._live:
                self._resize(storage._cdata, storage.nbytes())

        with patch.object(torch.UntypedStorage, "resize_", noted):
            yield

    def label(self, tensors: Iterable[Any], kind: str, owner: str | None = None) -> None:
        """Label storages by their use; one that operations never showed is entered now."""
        for tensor in tensors_in(list(tensors)):
            record = self.record_of(tensor) or self._note(tensor, None, None)
            if record is not None:
                record.kind = kind
                record.owner = record.owner if owner is None else owner

    def enter_block(self, num_bytes: int, kind: str, owner: str, *, stays: bool) -> None:
        """Note device memory that no tensor holds; unless it stays, it is given back at once."""
        index = self._enter(
            num_bytes, False, shape=(num_bytes,), dtype=torch.uint8, operation="", owner=owner, kind=kind
        )
        if not stays:
            self._end(index)

    def closed(self) -> AllocationHistory:
        """Return the history, to which not even later deaths are added."""
        self._live.clear()
        return self.history

    def record_of(self, tensor: Tensor) -> StorageRecord | None:
        found = self._live.get(tensor.untyped_storage()._cdata)
        return None if found is None else self.history.records[found[0]]

    def _running_place(self) -> str:
        """Return the running module, or in backward the one whose forward pass, or whose weight, it is about."""
        if self.phases.module or self.phases.name != BACKWARD:
            return self.phases.module
        node: Any = torch._C._current_autograd_node()
        if node is None:  # the engine itself adds up gradients
            return self._place
        if hasattr(node, "variable"):
            record = self.record_of(node.variable)
            return record.owner if record is not None else self._place
        return self.phases.module_of(node._sequence_nr())

    def _source(self, args: Any, number: int) -> int | None:
        """Return the storage that a result is made from: of a list, the one at the same place."""
        if not args:
            return None
        tensors = tensors_in(args[0])
        tensor = tensors[number] if number < len(tensors) else next(iter(tensors), None)
        found = None if tensor is None else self._live.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[0]

    def _note(self, tensor: Tensor, function: Any, source: int | None) -> StorageRecord | None:
        device = device_kind(tensor)
        if device not in (self._counted, "cpu"):
            return None
        storage = tensor.untyped_storage()
        address = storage._cdata
        num_bytes = storage.nbytes()
        if address in self._live:
            self._resize(address, num_bytes)
            return self.history.records[self._live[address][0]]
        if num_bytes == 0:
            return None
        facts = {"shape": tuple(tensor.shape), "dtype": tensor.dtype, "source": source, "stream": self.phases.stream}
        operation = "" if function is None else name_of(function)
        on_host = device != self._counted
        index = self._enter(num_bytes, on_host, operation=operation, owner=self.phases.module, kind="", **facts)
        # Its callback runs only while the weak reference itself is kept.
        self._live[address] = index, weakref.ref(storage, lambda _: self._bury(address))
        return self.history.records[index]

    def _enter(self, num_bytes: int, on_host: bool, **facts: Any) -> int:
        held_bytes = num_bytes if on_host else self._rounded(num_bytes)
        phase, born = self.phases.name, self.history.position
        return self._add(StorageRecord(held_bytes, num_bytes, on_host, phase=phase, born=born, **facts))

    def _add(self, record: StorageRecord) -> int:
        index = len(self.history.records)
        self.history.records.append(record)
        self._write(index, record.num_bytes)
        return index

    def _resize(self, address: int, requested: int) -> None:
        """Note another size: empty, a storage is dead, and filled again it is a new record."""
        index, reference = self._live[address]
        record = self.history.records[index]
        if requested == (record.requested_bytes if record.died is None else 0):
            return
        num_bytes = requested if record.on_host else self._rounded(requested)
        if record.died is not None:
            again = replace(record, num_bytes=num_bytes, requested_bytes=requested, died=None)
            again.born, again.phase, again.stream = self.history.position, self.phases.name, self.phases.stream
            self._live[address] = self._add(again), reference
        elif requested:
            self._write(index, num_bytes - record.num_bytes)
            record.num_bytes, record.requested_bytes = num_bytes, requested
        else:
            self._end(index)

    def _bury(self, address: int) -> None:
        index, _ = self._live.pop(address)
        if self.history.records[index].died is None:
            self._end(index)

    def _end(self, index: int) -> None:
        record = self.history.records[index]
        record.died = self.history.position
        self._write(index, -record.num_bytes)

    def _write(self, index: int, num_bytes: int) -> None:
        self.history.changes.append(Change(index, num_bytes, self.phases.name, self._place))

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._block_bytes) * self._block_bytes
