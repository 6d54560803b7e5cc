"""Tensors that stay behind, and their holders, in words."""

from collections import defaultdict
from dataclasses import dataclass
from operator import itemgetter

import torch

from hf_memopt.memory.leaks.live_storages import GRADIENT, SAVED, WITH_GRAPH, Held, graph_nodes, live_storages
from hf_memopt.memory.leaks.referrers import describe_holder
from hf_memopt.transfer.host_arena import HostHoldings
from hf_memopt.units import format_bytes

_MAX_CULPRITS = 6


@dataclass(frozen=True)
class Culprit:
    """Tensors of one kind that stay behind.

    Attributes:
        kind: "tensor", "tensor with its graph", "gradient", "saved for backward", "parameter", or "unreached" for
            memory that an accelerator's allocator counts and neither Python nor autograd reaches.
        shape: shape of one of them; None where they differ. Empty for scalars and for "unreached".
        dtype: as in `torch.float32`; None for "unreached".
        count: number of storages left in the tested steps.
        bytes: their size.
        graph_nodes: autograd nodes that one of them keeps alive.
        held_by: the references to one of them, as a Python expression, or how autograd holds it.
    """

    kind: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype | None
    count: int
    bytes: int
    graph_nodes: int
    held_by: str

    def __str__(self) -> str:
        if self.dtype is None:
            return f"{format_bytes(self.bytes)} {self.kind}\n    {self.held_by}"
        nodes = f", each with {self.graph_nodes} autograd nodes" if self.graph_nodes else ""
        dtype = str(self.dtype).removeprefix("torch.")
        what = f"{self.count} x {self.kind}: {format_shape(self.shape)} {dtype}"
        return f"{what}, {format_bytes(self.bytes)}{nodes}\n    held by {self.held_by}"


@dataclass(frozen=True)
class LeakReport:
    """Verdict on a run of steps; `str` makes a readable page of it.

    Attributes:
        leaking: whether memory stays behind at nearly every step.
        bytes_per_step: median over the tested steps. Small where only autograd graphs stay, whose nodes are no tensors.
        culprits: tensors that stay, the largest first.
        first_step, last_step: the tested steps, counted from 1.
        bytes_freed_by_gc: how much of it one `gc.collect()` freed, because only reference cycles held it.
        sees_allocator: whether an accelerator's allocator was asked too.
        offload: host memory that offloading holds, and how often it has taken some from the first tested step on, as
            batches of other sizes let it; a sound run soon takes no more.
    """

    leaking: bool
    bytes_per_step: float
    culprits: tuple[Culprit, ...]
    first_step: int
    last_step: int
    bytes_freed_by_gc: int
    sees_allocator: bool
    offload: HostHoldings

    def __str__(self) -> str:
        steps = f"steps {self.first_step} to {self.last_step}"
        if not self.leaking:
            lines = [f"No memory leak: nothing stays behind regularly in {steps}."]
        else:
            lines = [f"Memory leak: {format_bytes(self.bytes_per_step)} stay behind per step, {steps}."]
            lines += [f"  {culprit}" for culprit in self.culprits]
        if self.bytes_freed_by_gc:
            freed = format_bytes(self.bytes_freed_by_gc)
            lines.append(f"  gc.collect() freed {freed} of it: reference cycles that wait for the garbage collector.")
        if self.offload.num_bytes:
            held = format_bytes(self.offload.num_bytes)
            lines.append(f"Offloading holds {held} of host memory, taken {self.offload.num_allocations} times of late.")
        if not self.sees_allocator:
            lines.append("Not seen on the CPU: memory that neither Python nor an autograd graph reaches.")
        return "\n".join(lines)


class MemoryLeakError(RuntimeError):
    """Memory stays behind at every step. `report` names the tensors and their holders."""

    def __init__(self, report: LeakReport) -> None:
        super().__init__(str(report))
        self.report = report


def unreached(num_bytes: int) -> Culprit:
    remedy = "neither Python nor an autograd graph reaches it: a C++ extension, or a library's workspace"
    return Culprit("unreached", (), None, 0, num_bytes, 0, remedy)


def find_culprits(suspects: dict[int, int], num_samples: int) -> tuple[Culprit, ...]:
    """Describe storages that leak, by address and step of birth, but for rare kinds; takes up to seconds."""
    held = live_storages()
    # The newest last, because `_culprit` describes the last of a group: a list that grows is reached from its end, and
    # in a linked chain the newest object has the shortest way to a name in the program.
    leaked = [(held[address], step) for address, step in sorted(suspects.items(), key=itemgetter(1)) if address in held]
    # Tensors that do not leak must not be held while referrers are searched for.
    del held
    groups = _group(leaked, num_samples / 2, by_shape=True) or _group(leaked, num_samples / 2, by_shape=False)
    groups.sort(key=lambda group: (-_num_bytes(group), -len(group)))
    entries = [entry for entries, _ in leaked for entry in entries]
    return tuple(_culprit(group, entries) for group in groups[:_MAX_CULPRITS])


Storage = list[Held]  # one entry for each kind of holder, Python's first


def _group(leaked: list[tuple[Storage, int]], min_samples: float, by_shape: bool) -> list[list[Storage]]:
    groups: defaultdict[object, list[Storage]] = defaultdict(list)
    births: defaultdict[object, set[int]] = defaultdict(set)
    for storage, step in leaked:
        tensor = storage[0].tensor
        key = (storage[-1].kind, storage[-1].node, tensor.shape if by_shape else tensor.dim(), tensor.dtype)
        groups[key].append(storage)
        births[key].add(step)
    return [group for key, group in groups.items() if len(births[key]) >= min_samples]


def _culprit(group: list[Storage], ignore: list[Held]) -> Culprit:
    entry, held_by = _held_by(group[-1], ignore)
    nodes = sum(1 for _ in graph_nodes([entry.tensor], set())) if entry.kind == WITH_GRAPH else 0
    sizes = zip(*(storage[0].tensor.shape for storage in group), strict=True)
    shape = tuple(size[0] if len(set(size)) == 1 else None for size in sizes)
    return Culprit(entry.kind, shape, entry.tensor.dtype, len(group), _num_bytes(group), nodes, held_by)


def _held_by(storage: Storage, ignore: list[Held]) -> tuple[Held, str]:
    """Return the entry with a holder, Python before autograd: a tensor of Python's may be held by a graph alone."""
    for entry in storage:
        holder = describe_holder(entry.root, ignore)
        if holder is not None:
            return entry, _by_autograd(entry) + holder
    return storage[-1], f"{_by_autograd(storage[-1])}C++ alone"


def _by_autograd(entry: Held) -> str:
    root = f"{format_shape(entry.root.shape)} tensor"
    if entry.kind == GRADIENT:
        return f"the .grad of a {root}: "
    if entry.kind == SAVED:
        return f"{entry.node} in the graph of {'the .grad of ' if entry.root.is_leaf else ''}a {root}: "
    return ""


def _num_bytes(group: list[Storage]) -> int:
    return sum(storage[0].tensor.untyped_storage().nbytes() for storage in group)


def format_shape(shape: tuple[int | None, ...]) -> str:
    """Return `(8, *, 32)`, with a star for a size that differs."""
    return f"({', '.join('*' if size is None else str(size) for size in shape)})"
