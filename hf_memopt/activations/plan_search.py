"""The search for plans, over all budgets at once."""

import math
from collections.abc import Callable
from itertools import product

from hf_memopt.activations.plan_bound import enumerate_plans
from hf_memopt.activations.plan_front import Candidate, Thresholds, Trials, Window
from hf_memopt.activations.timeline import Action, Link, Profile

_KEEP, _OFFLOAD, _RECOMPUTE = (int(action) for action in Action)
_GRID = 4
_GRID_IN_FLIGHT = 1 / 8
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
# Members of the front around which one round searches, spread over the whole front.
_MEMBERS_PER_ROUND = 16
# Saves and uses to simulate in all, at about 1 us each, and plans, of which small profiles need no more.
_MAX_EVENTS = 1_200_000
_MAX_PLANS = 4_000
# Up to so many storages, almost all plans that the bound leaves over can be simulated in a few seconds at most.
_MAX_ENUMERATED = 10
_MAX_ENUMERATED_PLANS = 60_000

Move = Callable[[Candidate], None]


def search_plans(
    profile: Profile, link: Link, prefetch_ahead: int, host_budget_bytes: int | None = None
) -> list[Candidate]:
    """Simulated plans, among them the best that were found for every budget.

    See `planner` for the method. It does not know the device budget, so that a larger one never leads to a slower plan.
    """
    num_plans = min(_MAX_PLANS, _MAX_EVENTS // max(1, len(profile.events)))
    trials = Trials(profile, link, prefetch_ahead, host_budget_bytes, max(2 * _GRID**3, num_plans))
    _Search(trials).run()
    if len(profile.storages) <= _MAX_ENUMERATED:
        trials.num_left += _MAX_ENUMERATED_PLANS
        enumerate_plans(trials)
    return trials.candidates


class _Search:
    """Pareto local search: try plans near those on the front of peak and step time, as long as that moves the front."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._profile = trials.profile
        storages, sizes = self._profile.storages, self._profile.sizes
        costs = [
            (storage.recompute_s / max(1, size), _spread(index), index)
            for index, (storage, size) in enumerate(zip(storages, sizes, strict=True))
            if storage.recompute_s is not None
        ]
        lifetimes = [
            (needed_s - storage.saved_at_s, -index)
            for index, (storage, needed_s) in enumerate(zip(storages, self._profile.first_needs_s, strict=True))
        ]
        self._recompute_ranks = _byte_ranks(self._profile, [index for _, _, index in sorted(costs)])
        self._lifetime_ranks = _byte_ranks(self._profile, [-index for _, index in sorted(lifetimes)])

    def run(self) -> None:
        self._try_grid()
        coarse: list[Move] = [
            self._thresholds_move(1 / 8),
            self._vary_window,
            self._thresholds_move(1 / 16),
            self._blend,
            self._thresholds_move(1 / 32),
        ]
        self._improve(coarse)
        self._improve([*coarse, self._change_one])
        self._improve([*coarse, self._change_one_in_any_window])

    def _improve(self, moves: list[Move]) -> None:
        """Apply each move to each member of the front until all have been applied to all."""
        done: list[set[Candidate]] = [set() for _ in moves]
        progress = True
        while progress and self._trials.num_left:
            progress = False
            for move, seen in zip(moves, done, strict=True):
                todo = [member for member in self._trials.front.members if member not in seen]
                progress = progress or bool(todo)
                for member in todo[:: -(-len(todo) // _MEMBERS_PER_ROUND) or 1]:
                    seen.add(member)
                    if member in self._trials.front.members:
                        move(member)

    def _try_grid(self) -> None:
        steps = [step / _GRID for step in range(_GRID + 1)]
        window = max(window for window in self._trials.windows if window.in_flight_fraction <= _GRID_IN_FLIGHT)
        for thresholds in product(steps, repeat=3):
            self._try_thresholds(Thresholds(*thresholds), window)
        for recompute in steps:  # the smallest peaks
            self._try_thresholds(Thresholds(recompute, recompute, 1.0), self._trials.windows[0])

    def _try_thresholds(self, thresholds: Thresholds, window: Window) -> None:
        self._trials.attempt(self._threshold_plan(thresholds), window, thresholds)

    def _threshold_plan(self, thresholds: Thresholds) -> bytes:
        """Recompute what is cheap for its bytes; of the rest, offload what lives long and keep what is used soon.

        What lives long is mostly saved early, when the link still has time: there recomputation competes with a copy,
        later with memory, so that each has its own threshold.
        """
        actions = bytearray()
        for cost, lifetime in zip(self._recompute_ranks, self._lifetime_ranks, strict=True):
            if lifetime >= 1 - thresholds.offload:
                actions.append(_RECOMPUTE if cost < thresholds.recompute_early else _OFFLOAD)
            else:
                actions.append(_RECOMPUTE if cost < thresholds.recompute_late else _KEEP)
        return bytes(actions)

    def _thresholds_move(self, step: float) -> Move:
        def move(member: Candidate) -> None:
            if member.thresholds is None:
                return
            for position, change in product(range(3), (step, -step)):
                moved = list(member.thresholds)
                moved[position] = min(1.0, max(0.0, moved[position] + change))
                self._try_thresholds(Thresholds(*moved), member.window)

        return move

    def _vary_window(self, member: Candidate) -> None:
        """The next wider and narrower windows, in flight and prefetched."""
        windows = self._trials.windows
        place = windows.index(member.window)
        num_prefetch = sum(window.in_flight_fraction == 0 for window in windows)
        for other in (place - num_prefetch, place - 1, place + 1, place + num_prefetch):
            if 0 <= other < len(windows):
                self._trials.attempt(member.actions, windows[other], member.thresholds)

    def _blend(self, member: Candidate) -> None:
        """Between two neighbours on the front: one's actions for the shorter lived half of what differs, or for every
        other storage of it, and the other's for the rest."""
        for neighbour in self._trials.front.neighbours(member):
            differing = [
                i for i, pair in enumerate(zip(member.actions, neighbour.actions, strict=True)) if pair[0] != pair[1]
            ]
            differing.sort(key=self._lifetime_ranks.__getitem__)
            for part in (differing[: len(differing) // 2], differing[::2]):
                blend = bytearray(member.actions)
                for index in part:
                    blend[index] = neighbour.actions[index]
                for window in {member.window, neighbour.window}:
                    self._trials.attempt(bytes(blend), window)

    def _change_one(self, member: Candidate) -> None:
        """Every other action for every single storage."""
        self._change_one_with(member, [member.window])

    def _change_one_in_any_window(self, member: Candidate) -> None:
        self._change_one_with(member, self._trials.windows)

    def _change_one_with(self, member: Candidate, windows: list[Window]) -> None:
        for index, storage in enumerate(self._profile.storages):
            for action in (_KEEP, _OFFLOAD, _RECOMPUTE):
                if action == _RECOMPUTE and storage.recompute_s is None:
                    continue
                changed = bytearray(member.actions)
                changed[index] = action
                for window in windows:
                    self._trials.attempt(bytes(changed), window)


def _byte_ranks(profile: Profile, order: list[int]) -> list[float]:
    """Where in `order` each storage comes, from 0 to 1 and counted in bytes; infinity for those not in it."""
    total = sum(profile.sizes[index] for index in order) or 1
    ranks = [math.inf] * len(profile.sizes)
    before = 0
    for index in order:
        ranks[index] = (before + profile.sizes[index] / 2) / total
        before += profile.sizes[index]
    return ranks


def _spread(index: int) -> float:
    """A tie break which spreads any first part of a sequence evenly over it, as equal layers need it on a link."""
    return index * _GOLDEN_RATIO % 1
