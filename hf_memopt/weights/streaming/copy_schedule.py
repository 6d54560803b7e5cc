"""Plans how weights stream: which travel together, which stay on the device for how long, in what order others pass.

reads of a visit     p0 p1 p2 | e0 e1 | e0 e1 | e0 e1        a prefix that runs once, and three steps of an expert
ring (two slots)     p0 p1 p2 |                              each passes through once
hot set              .  .  .  | e0 e1 | .  .  | .  .  evict  brought once, and kept to the end of the loop
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hf_memopt.weights.streaming.access_trace import Read

# The most blocks of a pass over all weights, where no single weight forbids it.
_MAX_BLOCKS = 64


@dataclass(frozen=True)
class Block:
    """Weights that travel together.

    Attributes:
        slices: indices into `PackedWeights.slices`.
        num_bytes: their sum.
        evict_at: None for a block of the ring, evicted when the next ones need its slot. A hot block stays until this
            position of the sequence is reached, or until the visit ends if none has this number.
    """

    slices: tuple[int, ...]
    num_bytes: int
    evict_at: int | None = None

    @property
    def stays(self) -> bool:
        """Return whether this is a hot block: read again and again, and kept meanwhile."""
        return self.evict_at is not None


@dataclass(frozen=True)
class StreamPlan:
    """The plan of streaming in a visit.

    Attributes:
        blocks: of every weight, unread ones included.
        sequence: blocks in the expected order of reads; those that stay, once.
        needs: by a module's name, the blocks to bring before it runs.
        at_start: blocks to bring before the visit begins, since no module's call announces their reads.
        slot_bytes: of the ring.
        num_slots: of the ring.
    """

    blocks: tuple[Block, ...]
    sequence: tuple[int, ...]
    needs: Mapping[str, tuple[int, ...]]
    at_start: tuple[int, ...]
    slot_bytes: int
    num_slots: int

    @property
    def hot_bytes(self) -> int:
        """The most bytes of hot blocks present at the same time."""
        present = set(self.at_start)
        most = self._sum(present)
        for position, number in enumerate(self.sequence):
            if self.blocks[number].stays:
                present = {each for each in present if (self.blocks[each].evict_at or 0) > position} | {number}
                most = max(most, self._sum(present))
        return most

    @property
    def ring_bytes(self) -> int:
        passes = any(not self.blocks[number].stays for number in self.sequence)
        return self.num_slots * self.slot_bytes if passes else 0

    @property
    def device_bytes(self) -> int:
        """The most that a visit like the traced one holds on the device: the hot set and the ring."""
        return self.hot_bytes + self.ring_bytes

    @property
    def visit_bytes(self) -> int:
        present = set(self.at_start)
        total = self._sum(present)
        for position in range(len(self.sequence)):
            expected = self._expected(position)
            total += self._sum(expected - present)
            present = expected | {number for number in present if self.blocks[number].stays}
        return total

    def _expected(self, position: int) -> set[int]:
        """Return the block at a position of the sequence, and those after it for which there are slots."""
        found: set[int] = set()
        for number in self.sequence[position:]:
            found.add(number)
            if len(found) == self.num_slots:
                break
        return found

    def _sum(self, numbers: Iterable[int]) -> int:
        return sum(self.blocks[number].num_bytes for number in numbers)


def untraced_plan(sizes: Sequence[int]) -> StreamPlan:
    """Plan the visit that is traced: every weight is brought when it is read, and evicted with the next read."""
    blocks = tuple(Block((index,), size) for index, size in enumerate(sizes))
    return StreamPlan(blocks, (), {}, (), slot_bytes=0, num_slots=0)


def plan_stream(
    reads: Sequence[Read],
    sizes: Sequence[int],
    owned: Mapping[str, tuple[int, ...]],
    budget_bytes: int | None = None,
) -> StreamPlan:
    """Turn a traced visit into a plan.

    Weights stay if they would pass through a ring of two slots more than once, from their first read to the end of the
    loop that reads them: a vision encoder that sees one camera after the other is gone before the sampler's steps.
    `budget_bytes` is for hot set and ring together; the weights read most often stay. The ring, and weights whose
    reading no call announces, are needed under any limit.

    Args:
        reads: the trace.
        sizes: bytes of each slice.
        owned: by the names of modules that the trace has not seen, the slices to bring should one be called later.
        budget_bytes: None, no limit.
    """
    # Slices of one read must be on the device together, so a slot holds the largest such unit at least. Fewer, larger
    # copies use the link better.
    units = _first_reads(reads)
    unit_bytes = [sum(sizes[index] for index in unit) for unit in units]
    slot_bytes = max([sum(unit_bytes) // _MAX_BLOCKS, *unit_bytes])
    # No hook runs right before these reads: outside of all modules, or after a call of another module, which may have
    # evicted the weights again.
    unannounced = {index for read in reads if read.module is None or read.late for index in read.slices}
    room = None if budget_bytes is None else budget_bytes - 2 * slot_bytes - sum(sizes[index] for index in unannounced)
    # Only weights that the ring alone would bring twice or more are worth keeping, the most often loaded first.
    loads = _count_loads(reads, sizes, 2 * slot_bytes)
    again = [index for index, count in loads.most_common() if count > 1 and index not in unannounced]
    # By slice, the read after which it need not stay.
    ends = _within(_loops(reads, again), sizes, room) | dict.fromkeys(unannounced, len(reads))
    # From here on everything is in blocks. Weights that the trace never read get a block each, outside of the sequence:
    # a later visit that takes another path brings them one by one.
    groups = [
        *_grouped(units, ends, sizes, slot_bytes),
        *(Block((index,), size) for index, size in enumerate(sizes) if index not in loads),
    ]
    block_of = {index: number for number, block in enumerate(groups) for index in block.slices}
    sequence, reached = _sequence(reads, block_of, groups)
    needs = _needs(reads, owned, block_of)
    seen = {read.module for read in reads}
    together = [sum(not groups[n].stays for n in blocks) for name, blocks in needs.items() if name in seen]
    return StreamPlan(
        blocks=tuple(b if b.evict_at is None else replace(b, evict_at=reached[b.evict_at]) for b in groups),
        sequence=tuple(sequence),
        needs=needs,
        at_start=tuple(sorted({block_of[index] for index in unannounced})),
        slot_bytes=max((groups[number].num_bytes for number in sequence if not groups[number].stays), default=0),
        num_slots=1 + max([1, *together]),
    )


def _count_loads(reads: Sequence[Read], sizes: Sequence[int], capacity_bytes: int) -> Counter[int]:
    """Count how often each slice would be brought if the least recently used ones made room."""
    loads: Counter[int] = Counter()
    present: OrderedDict[int, int] = OrderedDict()
    for read in reads:
        for index in read.slices:
            loads[index] += index not in present
            present[index] = sizes[index]
            present.move_to_end(index)
        # The present read's slices stay even if they alone exceed the capacity.
        while sum(present.values()) > capacity_bytes and len(present) > len(read.slices):
            present.popitem(last=False)
    return loads


def _loops(reads: Sequence[Read], slices: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return of each slice the first read, and the last read of the loop around it.

    A loop reads all its weights for the first time before it reads one for the last time.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, read in enumerate(reads):
        for index in read.slices:
            first.setdefault(index, number)
            last[index] = number
    return {
        index: (first[index], max(last[other] for other in slices if first[index] <= first[other] <= last[index]))
        for index in slices
    }


def _within(loops: Mapping[int, tuple[int, int]], sizes: Sequence[int], room: int | None) -> dict[int, int]:
    """Return the ends of the loops that fit `room` bytes at any time; `loops` come by priority."""
    if room is None:
        return {index: end for index, (_, end) in loops.items()}
    # Bytes that stay at each moment at which something begins to stay: in between, the sum only falls.
    taken = dict.fromkeys((begin for begin, _ in loops.values()), 0)
    ends: dict[int, int] = {}
    for index, (begin, end) in loops.items():
        moments = [moment for moment in taken if begin <= moment <= end]
        if all(taken[moment] + sizes[index] <= room for moment in moments):
            ends[index] = end
            for moment in moments:
                taken[moment] += sizes[index]
    return ends


def _first_reads(reads: Sequence[Read]) -> list[tuple[int, ...]]:
    """Return of each read the slices not read before: they should travel together."""
    seen: set[int] = set()
    units = []
    for read in reads:
        unit = tuple(index for index in read.slices if index not in seen)
        seen.update(unit)
        if unit:
            units.append(unit)
    return units


def _grouped(
    units: Sequence[tuple[int, ...]], ends: Mapping[int, int], sizes: Sequence[int], slot_bytes: int
) -> list[Block]:
    """Join neighbours in the order of first use that are evicted together, up to the size of a slot."""
    groups: list[Block] = []
    open_group: dict[int | None, int] = {}  # by `evict_at`, the group that still has room
    for unit in units:
        for end in dict.fromkeys(ends.get(index) for index in unit):
            slices = tuple(index for index in unit if ends.get(index) == end)
            num_bytes = sum(sizes[index] for index in slices)
            number = open_group.get(end)
            if number is None or groups[number].num_bytes + num_bytes > slot_bytes:
                open_group[end] = len(groups)
                groups.append(Block(tuple(sorted(slices)), num_bytes, end))
            else:
                group = groups[number]
                groups[number] = Block(tuple(sorted(group.slices + slices)), group.num_bytes + num_bytes, end)
    return groups


def _needs(
    reads: Sequence[Read], owned: Mapping[str, tuple[int, ...]], block_of: Mapping[int, int]
) -> dict[str, tuple[int, ...]]:
    called: dict[str, set[int]] = {}
    for read in reads:
        if read.module is not None and not read.late:
            called.setdefault(read.module, set()).update(block_of[index] for index in read.slices)
    others = {name: {block_of[index] for index in indices} for name, indices in owned.items()}
    # One tuple for equal needs, so that going from module to module of a block is seen by identity.
    same: dict[tuple[int, ...], tuple[int, ...]] = {}
    return {
        name: same.setdefault(key, key)
        for name, blocks in {**others, **called}.items()
        if (key := tuple(sorted(blocks)))
    }


def _sequence(
    reads: Sequence[Read], block_of: Mapping[int, int], blocks: Sequence[Block]
) -> tuple[list[int], list[int]]:
    """Return the expected sequence of blocks, and its length after each read: a loop's end as `evict_at`.

    The last length stands twice, for weights that stay until the visit ends.
    """
    sequence: list[int] = []
    reached: list[int] = []
    brought: set[int] = set()
    for read in reads:
        for number in dict.fromkeys(block_of[index] for index in read.slices):
            if sequence[-1:] != [number] and not (blocks[number].stays and number in brought):
                sequence.append(number)
                brought.add(number)
        reached.append(len(sequence))
    return sequence, [*reached, len(sequence)]
