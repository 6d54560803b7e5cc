"""Adds layers to the history of a model that has few: the changes of one more layer are seen, and repeated.

The changes of a pass, by the layer that they belong to, with layer 1 as the template and two layers added:

three layers   forward 0 0 1 1 1 2 2  |  backward 2 2 2 1 1 0 0  |  update 0 1 2
five layers    forward 0 0 1 1 1 x x x y y y 2 2  |  backward 2 2 2 y y x x 1 1 0 0  |  update 0 1 x y 2

That more layers do the same is not taken for granted: `growth` compares a history with a layer added to that of a model
which really has one more, change by change. Where they differ, nothing is repeated.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from hf_memopt.planning.accounting.allocation_log import (
    BACKWARD,
    FORWARD,
    GENERATION,
    AllocationHistory,
    Change,
    StorageRecord,
)
from hf_memopt.planning.accounting.caching_allocator import BLOCK_BYTES

_PASSES = (FORWARD, GENERATION, BACKWARD)


class NotRepeatedError(Exception):
    """More layers do not repeat the changes of those that were seen."""


@dataclass(frozen=True)
class Layers:
    """The place of a model's repeated layers."""

    name: str  # of the list of modules that they are in, such as "model.layers"
    count: int  # in all
    period: int = 1  # every how many of them the same kind returns; these count as one below, a group
    reach: int = 1  # how many groups on the storages of a group may still be used, or end: 1, in the next one

    @property
    def template(self) -> int:
        """One group between others, since the first and the last are often special."""
        return self.reach

    @property
    def num_few(self) -> int:
        """The template, and the groups that it may exchange storages with."""
        return 2 * self.reach + 1

    def group_of(self, place: str) -> int | None:
        cut = _cut_at_number(self.name, place)
        return None if cut is None else cut[1] // self.period

    def renamed(self, place: str, num_groups: int) -> str:
        cut = _cut_at_number(self.name, place)
        if num_groups == 0 or cut is None:
            return place
        before, number, behind = cut
        return f"{before}{number + num_groups * self.period}{behind}"


@cache  # many changes have the same place
def _cut_at_number(layers: str, place: str) -> tuple[str, int, str] | None:
    """Split a place at the number of its layer; return the part before, the number and the rest, None outside."""
    found = re.fullmatch(rf"((?:.*?\.)?{re.escape(layers)}\.)(\d+)((?:\..*)?)", place)
    return (found[1], int(found[2]), found[3]) if found else None


class _Role(NamedTuple):
    """The place of a storage in its group, the same in all equal groups; `number` counts those made so before."""

    phase: int
    operation: str
    place: str
    number: int


class _Run(NamedTuple):
    """Changes from `begin` to before `end` of one group, or of none, in one phase, numbered from the start."""

    group: int | None
    phase: int
    begin: int
    end: int


# The growth of storages outside of the repeated layers with each group, by index: bytes, and each length.
Growth = Mapping[int, tuple[int, tuple[int, ...]]]
_NONE: Growth = MappingProxyType({})


def growth(shorter: AllocationHistory, longer: AllocationHistory, layers: Layers) -> Growth:
    """Return how storages outside of the layers grow, such as norms of all weights; all else has to agree."""
    added = add_groups(shorter, layers, 1)
    if len(added.changes) != len(longer.changes) or len(added.records) != len(longer.records):
        raise NotRepeatedError(f"{len(longer.changes)} changes where {len(added.changes)} were expected")
    if (added.backwards, added.step_begins) != (longer.backwards, longer.step_begins):
        raise NotRepeatedError("passes begin elsewhere")
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    for index, (ours, theirs) in enumerate(zip(added.records, longer.records, strict=True)):
        if _identity(ours) != _identity(theirs) or len(ours.shape) != len(theirs.shape):
            raise NotRepeatedError(f"{theirs} where {ours} was expected")
        if ours.requested_bytes != theirs.requested_bytes:
            lengths = tuple(b - a for a, b in zip(ours.shape, theirs.shape, strict=True))
            found[index] = theirs.requested_bytes - ours.requested_bytes, lengths
    for position, (our, their) in enumerate(zip(added.changes, longer.changes, strict=True)):
        same_bytes = our.num_bytes == their.num_bytes or our.storage in found
        if (our.storage, our.phase) != (their.storage, their.phase) or not same_bytes:
            raise NotRepeatedError(f"change {position}: {their} where {our} was expected")
    return found


def _identity(record: StorageRecord) -> StorageRecord:
    return replace(record, num_bytes=0, requested_bytes=0, shape=(), source=None, stream=0)


def add_groups(
    history: AllocationHistory, layers: Layers, num_groups: int, each_adds: Growth = _NONE
) -> AllocationHistory:
    """Return the history of a model with more groups of layers; other storages grow with each of them.

    Raises:
        NotRepeatedError: the template's changes have no order among those of its neighbours, or concern storages that a
            further group would not have.
    """
    runs = _runs(history, layers)
    result = _Longer(history, runs, layers, num_groups, each_adds)
    groups = [None, *(run.group for run in runs), None]
    for run, before, behind in zip(runs, groups, groups[2:], strict=False):
        if run.group != layers.template:
            result.emit(run, num_groups if run.group is not None and run.group > layers.template else 0)
            continue
        ascends, descends = behind == layers.template + 1, before == layers.template + 1
        if ascends == descends:
            raise NotRepeatedError(f"changes {run.begin} to {run.end}: groups follow each other in no order")
        order = range(num_groups + 1)
        for number in order if ascends else reversed(order):
            result.emit(run, number)
    return result.history


def _runs(history: AllocationHistory, layers: Layers) -> list[_Run]:
    runs, begin = [], 0
    for (phase, group), members in groupby(_groups(history, layers)):
        end = begin + len(list(members))
        runs.append(_Run(group, phase, begin, end))
        begin = end
    # Storages that a group leaves behind often die in the next one's run, which they do not end.
    merged = runs[:1]
    for run, following in zip(runs[1:], [*runs[2:], None], strict=True):
        before = merged[-1]
        is_over = all(history.changes[position].num_bytes < 0 for position in range(run.begin, run.end))
        between = is_over and following is not None and before[:2] == following[:2]
        if between or before[:2] == run[:2] or (is_over and _is_late(history, layers, before, run)):
            merged[-1] = before._replace(end=run.end)
        else:
            merged.append(run)
    return merged


def _is_late(history: AllocationHistory, layers: Layers, before: _Run, run: _Run) -> bool:
    """Return whether something of a group goes only now, after its neighbour's run, with another group's."""
    if before.phase != run.phase or before.group is None or run.group is None:
        return False
    in_pass = history.changes[run.begin].phase in _PASSES
    return in_pass and 1 < abs(before.group - run.group) <= layers.reach


def _groups(history: AllocationHistory, layers: Layers) -> Iterator[tuple[int, int | None]]:
    """Yield for each change the number of its phase, and its group: the place's, else the storage's, else the last one.

    Outside of passes the last one is no help with a storage that belongs to none: it dies where it was born.
    """
    places = _places(history)
    current, phase, number = None, "", 0
    born_in: dict[int, int | None] = {}
    for change in history.changes:
        if change.phase != phase:
            current, phase, number = None, change.phase, number + 1
        running, owner = (layers.group_of(place) for place in (change.place, places[change.storage]))
        born = None if phase in _PASSES else born_in.get(change.storage)
        current = next((group for group in (running, owner, current) if group is not None), None)
        # A death elsewhere says nothing of what follows it.
        is_elsewhere = running is None and owner is None and born is not None
        group = born if is_elsewhere else current
        born_in.setdefault(change.storage, group)
        yield number, group


def _places(history: AllocationHistory) -> list[str]:
    records = history.records
    named = [record.owner or history.changes[record.born].place for record in records]
    # Results may tell where their source belongs: a weight's first form, before a cast.
    for index in range(len(records) - 1, -1, -1):
        source = records[index].source
        if source is not None and not named[source]:
            named[source] = named[index]
    for index, record in enumerate(records):
        if not named[index] and record.source is not None:
            named[index] = named[record.source]
    return named


class _Longer:
    def __init__(
        self, history: AllocationHistory, runs: list[_Run], layers: Layers, num_groups: int, each_adds: Growth
    ) -> None:
        self.history = AllocationHistory(history.in_blocks)
        self._old = history
        self._layers, self._num_groups, self._each_adds = layers, num_groups, each_adds
        # Old storages that belong to a group.
        self._roles: dict[int, tuple[int, _Role]] = {}
        counts: Counter[tuple[Any, ...]] = Counter()
        for run in runs:
            if run.group is None:
                continue
            for position in range(run.begin, run.end):
                change = history.changes[position]
                record = history.records[change.storage]
                if record.born == position:
                    made = run.phase, record.operation, layers.renamed(change.place, -run.group)
                    self._roles[change.storage] = run.group, _Role(*made, counts[run.group, made])
                    counts[run.group, made] += 1
        # New storages: by group and role, or by their old index.
        self._new: dict[tuple[int, _Role] | int, int] = {}

    def emit(self, run: _Run, shift: int) -> None:
        old, new = self._old, self.history
        for position in range(run.begin, run.end):
            new.backwards += [new.position] * old.backwards.count(position)
            new.step_begins += [new.position] * old.step_begins.count(position)
            self._emit(position, run, shift)

    def _emit(self, position: int, run: _Run, shift: int) -> None:
        change = self._old.changes[position]
        record = self._old.records[change.storage]
        key = self._key(change.storage, run, shift)
        grown_bytes = 0
        if record.born == position:
            record = self._grown(change.storage, record)
            grown_bytes = record.num_bytes - self._old.records[change.storage].num_bytes
            self._new[key] = len(self.history.records)
            owner = self._layers.renamed(record.owner, shift)
            record = replace(record, owner=owner, born=self.history.position, died=None, source=None)
            self.history.records.append(record)
        elif key not in self._new:
            raise NotRepeatedError(f"change {position}: group {run.group} has not what its neighbour has")
        elif record.died == position:
            new = self.history.records[self._new[key]]
            if new.died is not None:
                raise NotRepeatedError(f"change {position}: a storage dies twice")
            new.died = self.history.position
            grown_bytes = record.num_bytes - new.num_bytes
        index = self._new[key]
        place = self._layers.renamed(change.place, shift)
        self.history.changes.append(Change(index, change.num_bytes + grown_bytes, change.phase, place))

    def _key(self, index: int, run: _Run, shift: int) -> tuple[int, _Role] | int:
        if index not in self._roles:
            return index
        group, role = self._roles[index]
        # Neighbours hand storages to each other. Others mean the one and only, as the first group does when it ends
        # storages of the last one and of the loss behind it.
        if run.group is None or abs(run.group - group) > self._layers.reach:
            shift = self._num_groups if group > self._layers.template else 0
        return group + shift, role

    def _grown(self, index: int, record: StorageRecord) -> StorageRecord:
        if index not in self._each_adds:
            return record
        more_bytes, more_lengths = self._each_adds[index]
        requested = record.requested_bytes + self._num_groups * more_bytes
        block_bytes = BLOCK_BYTES if self.history.in_blocks and not record.on_host else 1
        rounded = -(-requested // block_bytes) * block_bytes
        lengths = zip(record.shape, more_lengths, strict=True)
        shape = tuple(length + self._num_groups * more for length, more in lengths)
        return replace(record, requested_bytes=requested, num_bytes=rounded, shape=shape)
