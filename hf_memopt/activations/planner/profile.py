"""The profile of a training step, recorded by passes and read by the planner."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property


class Action(IntEnum):
    """The place of a saved storage between its save in forward and its last use in backward."""

    KEEP = 0
    OFFLOAD = 1
    RECOMPUTE = 2


class EventKind(IntEnum):
    """Kinds of events; at equal times in this order."""

    SAVE = 0
    USE = 1
    FREE = 2
    END_OF_BACKWARD = 3


@dataclass(frozen=True)
class SavedStorage:
    """One device storage that autograd saved in a forward pass; times are seconds of compute, stalls excluded.

    Attributes:
        saved_at_s: time since the pass began.
        uses_s: every unpacking in backward; uses by one autograd node carry the same time. Empty and without `freed_s`:
            only a source for others, at no cost unless one of them is recomputed.
        recompute_s: compute seconds to make it again. None: it cannot be.
        sources: indices of the storages that recomputing it reads.
        freed_s: when its memory goes if it is kept. None: with its last need, as in a backward that frees its graph.
            Otherwise it was never used, or its graph was retained.
        can_offload: whether it may leave the device.
    """

    num_bytes: int
    saved_at_s: float
    uses_s: tuple[float, ...]
    recompute_s: float | None = None
    sources: tuple[int, ...] = ()
    freed_s: float | None = None
    can_offload: bool = True


@dataclass(frozen=True)
class Profile:
    """The storages that one training step saved, with the times of their saves and uses.

    Attributes:
        storages: in the order of saving.
        step_s: compute seconds of forward and backward, without stalls.
        backward_ends_s: when each backward pass but the last one ended; storages that it had brought back went then.

    Raises:
        ValueError: a storage is used before it or a source was saved; a source is missing, or depends on its dependent.
    """

    storages: tuple[SavedStorage, ...]
    step_s: float
    backward_ends_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for index, (storage, needed_at) in enumerate(zip(self.storages, self.first_needs_s, strict=True)):
            if storage.saved_at_s > needed_at:
                raise ValueError(
                    f"storage {index}: saved_at_s={storage.saved_at_s} is after its first need at {needed_at}; "
                    "times must be seconds of compute on one clock, for saves and uses alike"
                )

    @cached_property
    def sizes(self) -> list[int]:
        return [storage.num_bytes for storage in self.storages]

    @cached_property
    def num_uses_by_backward(self) -> list[list[int]]:
        counts = [[0] * len(self.storages) for _ in range(len(self.backward_ends_s) + 1)]
        for index, storage in enumerate(self.storages):
            for used_s in storage.uses_s:
                counts[bisect_left(self.backward_ends_s, used_s)][index] += 1
        return counts

    @cached_property
    def dependents_first(self) -> list[int]:
        num_unvisited = [0] * len(self.storages)
        for index, storage in enumerate(self.storages):
            for source in storage.sources:
                if not 0 <= source < len(self.storages):
                    raise ValueError(f"storage {index}: sources={storage.sources} names a storage that does not exist")
                num_unvisited[source] += 1
        order = [index for index, count in enumerate(num_unvisited) if count == 0]
        for index in order:
            for source in self.storages[index].sources:
                num_unvisited[source] -= 1
                if num_unvisited[source] == 0:
                    order.append(source)
        if len(order) < len(self.storages):
            raise ValueError("sources form a cycle; a storage can only be recomputed from what was there before it")
        return order

    @cached_property
    def first_needs_s(self) -> list[float]:
        """Return when each storage is needed first if everything that can be recomputed is; `inf` if never."""
        needs = [min(storage.uses_s, default=math.inf) for storage in self.storages]
        for index in self.dependents_first:
            for source in self.storages[index].sources:
                needs[source] = min(needs[source], needs[index])
        return needs

    @cached_property
    def lifetimes_s(self) -> list[float]:
        return [need_s - each.saved_at_s for each, need_s in zip(self.storages, self.first_needs_s, strict=True)]

    @cached_property
    def soonest_needed(self) -> list[int]:
        return sorted(range(len(self.storages)), key=lambda index: (self.lifetimes_s[index], -index))

    @cached_property
    def recompute_s_per_byte(self) -> dict[int, float]:
        prices = ((index, each.recompute_s, each.num_bytes) for index, each in enumerate(self.storages))
        return {index: seconds / max(1, num_bytes) for index, seconds, num_bytes in prices if seconds is not None}

    @cached_property
    def events(self) -> list[tuple[float, int, int]]:
        """Return `(time, kind, storage)` in time order; at equal times by `EventKind`, then by index."""
        events = [(end_s, int(EventKind.END_OF_BACKWARD), number) for number, end_s in enumerate(self.backward_ends_s)]
        for index, storage in enumerate(self.storages):
            events.append((storage.saved_at_s, int(EventKind.SAVE), index))
            events.extend((used_s, int(EventKind.USE), index) for used_s in storage.uses_s)
            if storage.freed_s is not None:
                events.append((storage.freed_s, int(EventKind.FREE), index))
        return sorted(events)

    @cached_property
    def use_order(self) -> list[int]:
        return list(dict.fromkeys(index for _, kind, index in self.events if kind == EventKind.USE))


def count_needs(profile: Profile, actions: Sequence[int]) -> list[int]:
    """Return how often each storage is needed: its own uses, and once for each storage recomputed from it."""
    return added_up(needs_by_backward(profile, actions))


def added_up(counts_by_backward: list[list[int]]) -> list[int]:
    """Return the counts of all backward passes together; with one pass, its own list."""
    first, *others = counts_by_backward
    return [sum(counts) for counts in zip(first, *others, strict=True)] if others else first


def needs_by_backward(profile: Profile, actions: Sequence[int]) -> list[list[int]]:
    """Return needs by backward pass; each pass computes again the storages that it needs."""
    return [_with_sources(profile, actions, num_uses.copy()) for num_uses in profile.num_uses_by_backward]


def _with_sources(profile: Profile, actions: Sequence[int], needs: list[int]) -> list[int]:
    storages = profile.storages
    for index in profile.dependents_first:
        if actions[index] == Action.RECOMPUTE:
            if storages[index].recompute_s is None:
                raise ValueError(f"actions[{index}] is RECOMPUTE, but storage {index} has recompute_s=None; keep it")
            if needs[index]:
                for source in storages[index].sources:
                    needs[source] += 1
    return needs


def reload_order(profile: Profile, actions: Sequence[int]) -> list[int]:
    """Return the offloaded storages in the order in which backward first needs them, also as sources."""
    order: dict[int, None] = {}
    recomputed: set[int] = set()
    # Sources are needed when their recomputed storage is needed first, so they go on top of the stack.
    stack = profile.use_order[::-1]
    while stack:
        index = stack.pop()
        if actions[index] == Action.OFFLOAD:
            order[index] = None
        elif actions[index] == Action.RECOMPUTE and index not in recomputed:
            recomputed.add(index)
            stack.extend(reversed(profile.storages[index].sources))
    return list(order)
