"""The memory history of a simulated step: every storage, and every change in order."""

import itertools
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch

from hf_memopt.planning.accounting.caching_allocator import MemoryTrace


@dataclass(slots=True)
class StorageRecord:
    """One storage, from its birth on.

    Attributes:
        num_bytes: as the allocator counts it, rounding included.
        requested_bytes: as the program asked for it.
        operation: that made it, such as "aten.mm.default".
        owner: the module that was running; "" outside of modules.
        kind: its use, where that is known; "" for the results of operations.
        born, died: positions where it is allocated and freed; `died` is None while it is allocated.
        source: index of the storage that it was made from, where no module was running; None if unknown.
        stream: number of the stream for which it was allocated; 0, the first one.
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
    source: int | None = None
    stream: int = 0


class Change(NamedTuple):
    """One change of memory.

    Attributes:
        storage: index of the record.
        num_bytes: by which it grew; negative when it shrank or died.
        place: the module, or the weight, for which work was being done; "" where it is unknown.
    """

    storage: int
    num_bytes: int
    phase: str
    place: str


@dataclass
class AllocationHistory:
    """All storages of a simulation, and all changes of memory. A position is the number of changes before it.

    Attributes:
        in_blocks: whether CUDA's allocator hands the memory out; else allocations are exact.
        records: all storages so far, in order of birth.
        backwards, step_begins: positions at which backward passes and steps begin.
    """

    in_blocks: bool
    records: list[StorageRecord] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
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
