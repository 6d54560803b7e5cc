"""Simulated plans, and the front of them: the fastest for each peak."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_memopt.activations.planner.profile import Action, Profile, count_needs
from hf_memopt.activations.planner.simulator import Timeline, simulate
from hf_memopt.transfer.tier import Tier

# A candidate that beats a front member of equal or smaller peak by a smaller share of the step is ignored.
_FRONT_STEP_TOLERANCE = 1e-3
_KEEP, _OFFLOAD = int(Action.KEEP), int(Action.OFFLOAD)


class CopyWindow(NamedTuple):
    in_flight_fraction: float  # of the offloaded bytes
    prefetch_storages: int  # times the largest offloaded storage


def windows(prefetch_ahead: int) -> list[CopyWindow]:
    in_flight = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
    prefetch = sorted({0, prefetch_ahead, *(count for count in (1, 2, 4, 8) if count < prefetch_ahead)})
    return [CopyWindow(fraction, count) for fraction in in_flight for count in prefetch]


def window_bytes(window: CopyWindow, offloaded_sizes: list[int]) -> tuple[int, int]:
    """Return `(in_flight_bytes, prefetch_bytes)`, the same for windows of the same effect."""
    if not offloaded_sizes:
        return 0, 0
    total = sum(offloaded_sizes)
    in_flight = int(window.in_flight_fraction * total)
    prefetch = min(window.prefetch_storages * max(offloaded_sizes), total)
    return (in_flight if in_flight >= min(offloaded_sizes) else 0), prefetch


class Thresholds(NamedTuple):
    """Rank thresholds, 0 to 1 in bytes, at which a plan changes its action; see `search._Search._threshold_plan`."""

    recompute_early: float
    recompute_late: float
    offload: float
    spread: bool = False  # offload evenly over the step instead of the longest-lived storages


@dataclass(eq=False)
class Candidate:
    """A simulated plan: an `Action` for each storage (as bytes: quick to copy, compare and change), and its cost.

    `memories` has the number of the tier that each storage goes to if it is offloaded.
    """

    actions: bytes
    memories: bytes
    window: CopyWindow
    in_flight_bytes: int
    prefetch_bytes: int
    timeline: Timeline
    thresholds: Thresholds | None

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes

    @property
    def step_s(self) -> float:
        return self.timeline.step_s


@dataclass(frozen=True)
class Limits:
    peak_bytes: int
    allow_step: Callable[[float], bool]

    def allow(self, candidate: Candidate) -> bool:
        return candidate.peak_bytes <= self.peak_bytes and self.allow_step(candidate.step_s)


class ParetoFront:
    """Candidates by peak, of which none is both slower and larger than another."""

    def __init__(self) -> None:
        self.members: list[Candidate] = []

    def add(self, candidate: Candidate) -> None:
        members = self.members
        if self.step_within(candidate.peak_bytes) <= candidate.step_s * (1 + _FRONT_STEP_TOLERANCE):
            return
        # Sorted by peak, so also by falling step time: the replaced candidates are neighbours.
        first = bisect_left(members, candidate.peak_bytes, key=lambda member: member.peak_bytes)
        last = first
        while last < len(members) and members[last].step_s >= candidate.step_s:
            last += 1
        members[first:last] = [candidate]

    def step_within(self, peak_bytes: int) -> float:
        """Return the step time of the fastest member of at most `peak_bytes`, infinity without one."""
        place = bisect_right(self.members, peak_bytes, key=lambda member: member.peak_bytes)
        return self.members[place - 1].step_s if place else math.inf

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        place = self.members.index(candidate)
        return self.members[max(0, place - 1) : place] + self.members[place + 1 : place + 2]


class Trials:
    """Simulates plans, each once and at most `num_left`, and remembers them; none that exceeds the tiers' budgets."""

    def __init__(self, profile: Profile, tiers: Sequence[Tier], prefetch_ahead: int, num_left: int) -> None:
        self.profile, self.tiers = profile, tiers
        self._memories = Memories(profile, tiers)
        self.windows = windows(prefetch_ahead)
        self.num_left = num_left
        self.front = ParetoFront()
        self.candidates: list[Candidate] = []
        self._known: dict[tuple[bytes, int, int], Candidate] = {}
        storages = list(enumerate(profile.storages))
        self._only_sources = [index for index, s in storages if not s.uses_s and s.freed_s is None]
        self._staying = [index for index, s in storages if not s.can_offload]

    def within(self, limits: Limits) -> list[Candidate]:
        return [candidate for candidate in self.candidates if limits.allow(candidate)]

    def evaluate(self, actions: bytes, window: CopyWindow, thresholds: Thresholds | None = None) -> Candidate | None:
        """Return the plan, simulated unless it is known, or None if the tiers have no room or no try is left."""
        actions = self._normalised(actions)
        in_flight, prefetch = window_bytes(window, self._offloaded(actions))
        return self._simulated(actions, window, in_flight, prefetch, thresholds)

    def evaluate_like(self, candidate: Candidate, actions: bytes, in_flight: int, prefetch: int) -> Candidate | None:
        """Evaluate a plan with windows of at most so many bytes, never wider than the candidate's."""
        actions = self._normalised(actions)
        offloaded = self._offloaded(actions)
        total, largest = sum(offloaded), max(offloaded, default=0)
        in_flight = min(in_flight, total)
        prefetch = min(prefetch, total, candidate.window.prefetch_storages * largest)
        return self._simulated(actions, candidate.window, in_flight, prefetch, None)

    def evaluate_again(self, actions: bytes, in_flight: int, prefetch: int) -> Candidate | None:
        """Evaluate a plan that was made for other times of the same storages."""
        return self._simulated(self._normalised(actions), self.windows[0], in_flight, prefetch, None)

    def change_first(
        self, candidate: Candidate, order: Sequence[int], action: int, allow: Callable[[Candidate], bool]
    ) -> tuple[Candidate, int]:
        """Give an action to the longest first part of `order` that is allowed, found by bisection.

        Returns the changed plan, or the candidate if none can change, and how many storages were changed.
        """
        best, count, too_many = candidate, 0, len(order) + 1
        while too_many - count > 1 and self.num_left:
            middle = (count + too_many) // 2
            changed = bytearray(candidate.actions)
            for index in order[:middle]:
                changed[index] = action
            trial = self.evaluate_like(candidate, bytes(changed), candidate.in_flight_bytes, candidate.prefetch_bytes)
            if trial is not None and allow(trial):
                best, count = trial, middle
            else:
                too_many = middle
        return best, count

    def _simulated(
        self, actions: bytes, window: CopyWindow, in_flight: int, prefetch: int, thresholds: Thresholds | None
    ) -> Candidate | None:
        key = (actions, in_flight, prefetch)
        if key in self._known:
            return self._known[key]
        tried = []
        for memories in self._memories.assignments(actions):
            if self.num_left == 0:
                break
            self.num_left -= 1
            timeline = simulate(
                self.profile, actions, self.tiers, in_flight_bytes=in_flight, prefetch_bytes=prefetch, memories=memories
            )
            tried.append(Candidate(actions, memories, window, in_flight, prefetch, timeline, thresholds))
        # Memory is given up in host order, so that all have the same peak.
        best = min(tried, key=lambda candidate: candidate.step_s, default=None)
        if best is not None:
            self._known[key] = best
            self.candidates.append(best)
            self.front.add(best)
        return best

    def _offloaded(self, actions: bytes) -> list[int]:
        return [size for size, action in zip(self.profile.sizes, actions, strict=True) if action == _OFFLOAD]

    def _normalised(self, actions: bytes) -> bytes:
        """Return the plan that this one comes to: immovable storages stay, unread sources count as kept."""
        if not self._only_sources and not self._staying:
            return actions
        normalised = bytearray(actions)
        for index in self._staying:
            if normalised[index] == _OFFLOAD:
                normalised[index] = _KEEP
        needs = count_needs(self.profile, normalised)
        for index in self._only_sources:
            if needs[index] == 0:
                normalised[index] = _KEEP
        return bytes(normalised)


# A file holds whole pages, and a tensor begins anywhere in one.
_DISK_SLACK = 2 * 4096
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Memories:
    """Assigns offloaded storages to the tiers below the device.

    With more bytes than the nearest tier may hold, two orders decide which storages fill it, each that still fits: the
    largest first, which leaves least of it unused; or some from everywhere in the pass, which lets the queues of both
    tiers work at the same time. The others go further down.
    """

    def __init__(self, profile: Profile, tiers: Sequence[Tier]) -> None:
        self._sizes, self._tiers = profile.sizes, tiers
        indices = range(len(profile.storages))
        self._orders = [
            sorted(indices, key=lambda index: (-profile.sizes[index], index)),
            sorted(indices, key=spread, reverse=True),
        ]

    def assignments(self, actions: bytes) -> Iterator[bytes]:
        """Yield different assignments, each with the number of a tier for every storage; none without room."""
        sizes = [size for size, action in zip(self._sizes, actions, strict=True) if action == Action.OFFLOAD]
        if not sizes or self._has_room(0, sizes):
            yield bytes(len(actions))
        elif len(self._tiers) > 1:
            yield from dict.fromkeys(found for order in self._orders if (found := self._filled(actions, order)))

    def _filled(self, actions: bytes, order: Sequence[int]) -> bytes | None:
        """Fill the first tier in an order and send the rest to the last; return None if that has no room for it."""
        last, room = len(self._tiers) - 1, self._tiers[0].budget_bytes
        assert room is not None
        memories, sent = bytearray(len(actions)), []
        for index in order:
            size = self._sizes[index]
            if actions[index] != Action.OFFLOAD:
                continue
            if size <= room:
                room -= size
            else:
                memories[index] = last
                sent.append(size)
        return bytes(memories) if self._has_room(last, sent) else None

    def _has_room(self, memory: int, sizes: list[int]) -> bool:
        tier = self._tiers[memory]
        slack = _DISK_SLACK * len(sizes) if tier.name == "disk" else 0
        return tier.budget_bytes is None or sum(sizes) + slack <= tier.budget_bytes


def spread(index: int) -> float:
    """Return a tie break that spreads any first part of a sequence evenly over it, as a link needs for equal layers."""
    return index * _GOLDEN_RATIO % 1
