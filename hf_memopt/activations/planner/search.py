"""The search for plans, over all budgets at once, from a grid of thresholds along the front of peak and time."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations, product

from hf_memopt.activations.planner.candidates import Candidate, CopyWindow, Thresholds, Trials, spread
from hf_memopt.activations.planner.profile import Action, Profile
from hf_memopt.transfer.tier import Tier

_CHOICES = _KEEP, _OFFLOAD, _RECOMPUTE = tuple(int(action) for action in Action)
_STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)
_GRID_IN_FLIGHT = 1 / 8
# Members of the front around which one round searches, spread over the whole front.
_MEMBERS_PER_ROUND = 16
# Plans to simulate: `_NUM_PLANS` and `_PLANS_PER_STORAGE` for each storage, at most `_MAX_PLANS` and `_MAX_EVENTS`
# simulated saves and uses in all (2 to 4 us each), but at least `_MIN_PLANS`.
_NUM_PLANS = 1_000
_PLANS_PER_STORAGE = 15
_MAX_PLANS = 4_000
_MAX_EVENTS = 400_000
_MIN_PLANS = 160
# Single storages are changed in profiles of up to this many: among more, one hardly matters.
_MAX_STORAGES_ONE_BY_ONE = 150
# Every action is tried for every storage in every window in profiles of up to this many, and for every pair of them.
_MAX_STORAGES_IN_ANY_WAY, _MAX_STORAGES_IN_PAIRS = 12, 5
_CHANGES_PER_VISIT = 4
# Smaller steps between members, as a share of the step, are not worth a search between them.
_WORTH_FILLING = 2e-3

Move = Callable[[Candidate], None]


def search_plans(
    profile: Profile,
    tiers: Sequence[Tier],
    prefetch_ahead: int,
    is_enough: Callable[[Candidate], bool] = lambda candidate: False,
) -> Trials:
    """Return plans for every budget: a larger one never leads to a slower plan.

    The search ends with its first plans, which are the same for every budget, if one of these `is_enough`.
    """
    wanted = min(_NUM_PLANS + _PLANS_PER_STORAGE * len(profile.storages), _MAX_PLANS)
    num_plans = min(wanted, _MAX_EVENTS // max(1, len(profile.events)))
    trials = Trials(profile, tiers, prefetch_ahead, max(_MIN_PLANS, num_plans))
    _Search(trials, is_enough).run()
    return trials


class _Search:
    """Pareto local search: tries plans near those on the front as long as that moves the front."""

    def __init__(self, trials: Trials, is_enough: Callable[[Candidate], bool]) -> None:
        self._trials, self._is_enough = trials, is_enough
        self._profile = trials.profile
        storages, prices = self._profile.storages, self._profile.recompute_s_per_byte
        self._choices = [_CHOICES if storage.recompute_s is not None else (_KEEP, _OFFLOAD) for storage in storages]
        cheapest = sorted(prices, key=lambda index: (prices[index], spread(index)))
        self._recompute_ranks = _byte_ranks(self._profile, cheapest)
        self._lifetime_ranks = _byte_ranks(self._profile, self._profile.soonest_needed)
        self._spread_ranks = _byte_ranks(self._profile, sorted(range(len(storages)), key=spread))
        self._s_per_byte = [1 / tier.write_bytes_per_s + 1 / tier.read_bytes_per_s for tier in trials.tiers]
        # Changes that `_change_one` has still to try: a member visited again goes on where its last visit ended.
        self._changes: dict[Candidate, Iterator[tuple[int, float, int, int]]] = {}

    def run(self) -> None:
        is_large = len(self._profile.storages) > _MAX_STORAGES_ONE_BY_ONE
        self._try_grid(_STEPS if is_large else _STEPS[::2])
        if not any(map(self._is_enough, self._trials.front.members)):
            self._improve_all(is_large)

    def _improve_all(self, is_large: bool) -> None:
        # Coarse moves first: each finer one starts from the front that the coarser ones left.
        moves: list[Move] = [
            self._thresholds_move(1 / 8),
            self._vary_window,
            self._thresholds_move(1 / 16),
            self._blend,
            self._thresholds_move(1 / 32),
        ]
        if is_large:
            self._improve([*moves, self._fill])
        else:
            self._improve([step for move in moves for step in (move, self._change_one)])
            self._improve([self._change_one, self._any_window, self._fill, self._avoid_stalls])
            if len(self._profile.storages) <= _MAX_STORAGES_IN_ANY_WAY:
                self._improve([partial(self._change_all_ways, num_storages=1), self._avoid_stalls])
            if len(self._profile.storages) <= _MAX_STORAGES_IN_PAIRS:
                self._improve([partial(self._change_all_ways, num_storages=2)])

    def _fill(self, member: Candidate) -> None:
        """Keep the storages that save most time per byte, up to the peak of the front's next member."""
        larger = [other for other in self._trials.front.neighbours(member) if other.peak_bytes > member.peak_bytes]
        if not larger or larger[0].step_s > member.step_s * (1 - _WORTH_FILLING):
            return
        order = sorted(
            (-self._saved_s_per_byte(member, index), rank, index)
            for index, rank in enumerate(self._lifetime_ranks)
            if member.actions[index] != _KEEP
        )
        indices = [index for _, _, index in order]
        self._trials.change_first(member, indices, _KEEP, lambda trial: trial.peak_bytes < larger[0].peak_bytes)

    def _saved_s_per_byte(self, member: Candidate, index: int) -> float:
        # A plan without stalls hides all its copies, so that keeping an offloaded storage saves no time.
        if member.actions[index] == _RECOMPUTE:
            return self._profile.recompute_s_per_byte[index]
        return self._s_per_byte[member.memories[index]] if member.timeline.stall_s else 0.0

    def _avoid_stalls(self, member: Candidate) -> None:
        """Recompute single storages instead of waiting for their copies, with windows of as many bytes as before."""
        for index, storage in enumerate(self._profile.storages):
            if member.actions[index] != _OFFLOAD or storage.recompute_s is None:
                continue
            copies_s = self._profile.sizes[index] * self._s_per_byte[member.memories[index]]
            if storage.recompute_s < min(copies_s, member.timeline.stall_s):
                changed = bytearray(member.actions)
                changed[index] = _RECOMPUTE
                self._trials.evaluate_like(member, bytes(changed), member.in_flight_bytes, member.prefetch_bytes)

    def _any_window(self, member: Candidate) -> None:
        # More in flight often pays only together with more prefetching.
        for window in self._trials.windows:
            self._trials.evaluate(member.actions, window, member.thresholds)

    def _improve(self, moves: list[Move]) -> None:
        done: list[set[Candidate]] = [set() for _ in moves]
        progress = True
        while progress and self._trials.num_left:
            progress = False
            for move, seen in zip(moves, done, strict=True):
                # Taken anew for each move, which may push members off the front.
                todo = [member for member in self._trials.front.members if member not in seen]
                progress = progress or bool(todo)
                for member in todo[:: -(-len(todo) // _MEMBERS_PER_ROUND) or 1]:
                    seen.add(member)
                    if member in self._trials.front.members:
                        move(member)

    def _try_grid(self, recompute_steps: tuple[float, ...]) -> None:
        window = max(window for window in self._trials.windows if window.in_flight_fraction <= _GRID_IN_FLIGHT)
        for early, late, offload in product(recompute_steps, recompute_steps, _STEPS):
            self._try_thresholds(Thresholds(early, late, offload), window)
        for recompute, offload in product(_STEPS, _STEPS[1:-1]):
            self._try_thresholds(Thresholds(recompute, recompute, offload, spread=True), window)
        for recompute in _STEPS:  # the smallest peaks
            self._try_thresholds(Thresholds(recompute, recompute, 1.0), self._trials.windows[0])

    def _try_thresholds(self, thresholds: Thresholds, window: CopyWindow) -> None:
        self._trials.evaluate(self._threshold_plan(thresholds), window, thresholds)

    def _threshold_plan(self, thresholds: Thresholds) -> bytes:
        """Recompute storages that are cheap for their bytes; offload long-lived ones of the rest, and keep the others.

        Long-lived storages are mostly saved early, when the link still has time: there recomputation competes with a
        copy, later with memory, hence two thresholds. A slow link takes compute between any two copies to hide them:
        then storages spread evenly over the step are offloaded.
        """
        actions = bytearray()
        offload_ranks = self._spread_ranks if thresholds.spread else self._lifetime_ranks
        for cost, lifetime in zip(self._recompute_ranks, offload_ranks, strict=True):
            if lifetime >= 1 - thresholds.offload:
                actions.append(_RECOMPUTE if cost < thresholds.recompute_early else _OFFLOAD)
            else:
                actions.append(_RECOMPUTE if cost < thresholds.recompute_late else _KEEP)
        return bytes(actions)

    def _thresholds_move(self, step: float) -> Move:
        def move(member: Candidate) -> None:
            if member.thresholds is None:
                return
            for name, change in product(("recompute_early", "recompute_late", "offload"), (step, -step)):
                value = min(1.0, max(0.0, getattr(member.thresholds, name) + change))
                self._try_thresholds(member.thresholds._replace(**{name: value}), member.window)

        return move

    def _vary_window(self, member: Candidate) -> None:
        windows = self._trials.windows
        place = windows.index(member.window)
        # Prefetching varies fastest, so that the next amount in flight is this many places away.
        num_prefetch = sum(window.in_flight_fraction == 0 for window in windows)
        for other in (place - num_prefetch, place - 1, place + 1, place + num_prefetch):
            if 0 <= other < len(windows):
                self._trials.evaluate(member.actions, windows[other], member.thresholds)

    def _blend(self, member: Candidate) -> None:
        """Try plans that take, where a member and a neighbour on the front differ, half of the neighbour's actions."""
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
                    self._trials.evaluate(bytes(blend), window)

    def _change_one(self, member: Candidate) -> None:
        """Try the next few changes of single storages that may move the front, likeliest first."""
        if member not in self._changes:
            self._changes[member] = iter(self._likely_changes(member))
        num_tried = 0
        for peak_bytes, step_s, index, action in self._changes[member]:
            if step_s < self._trials.front.step_within(peak_bytes):
                changed = bytearray(member.actions)
                changed[index] = action
                self._trials.evaluate(bytes(changed), member.window)
                num_tried += 1
                if num_tried == _CHANGES_PER_VISIT:
                    break

    def _change_all_ways(self, member: Candidate, num_storages: int) -> None:
        # Room or time that one change gives may be needed for another.
        for indices in combinations(range(len(member.actions)), num_storages):
            for actions in product(*(self._choices[index] for index in indices)):
                changed = bytearray(member.actions)
                for index, action in zip(indices, actions, strict=True):
                    changed[index] = action
                for window in self._trials.windows:
                    self._trials.evaluate(bytes(changed), window)

    def _likely_changes(self, member: Candidate) -> list[tuple[int, float, int, int]]:
        """Return `(peak_bytes, step_s, storage, action)` of changes, estimated; the best for the front now first."""
        step_within = self._trials.front.step_within
        changes = []
        for index, before in enumerate(member.actions):
            for action in self._choices[index]:
                if action != before:
                    peak_bytes, step_s = self._estimate(member, index, action)
                    gain = step_within(peak_bytes) - step_s
                    if gain > 0:
                        changes.append((gain, peak_bytes, step_s, index, action))
        changes.sort(reverse=True)
        return [change[1:] for change in changes]

    def _estimate(self, member: Candidate, index: int, action: int) -> tuple[int, float]:
        """Guess a changed plan's peak and step, to order the changes; simulating them decides."""
        # Where compute stalls, a storage's copies are taken to be a part of the stall.
        before, size = member.actions[index], self._profile.sizes[index]
        recompute_s = self._profile.storages[index].recompute_s or 0.0
        stall_s = member.timeline.stall_s
        peak_bytes, step_s = member.peak_bytes, member.step_s
        if before == _KEEP:
            peak_bytes -= size
        elif action == _KEEP:
            peak_bytes += size
        if before == _RECOMPUTE:
            step_s -= recompute_s
        elif action == _RECOMPUTE:
            step_s += recompute_s
        copies_s = size * self._s_per_byte[member.memories[index]]
        if before == _OFFLOAD:
            step_s -= min(stall_s, copies_s)
        elif action == _OFFLOAD and stall_s:
            step_s += copies_s
        return peak_bytes, step_s


def _byte_ranks(profile: Profile, order: list[int]) -> list[float]:
    """Return each storage's place in `order`, from 0 to 1 and counted in bytes; infinity for those not in it."""
    total = sum(profile.sizes[index] for index in order) or 1
    ranks = [math.inf] * len(profile.sizes)
    before = 0
    for index in order:
        ranks[index] = (before + profile.sizes[index] / 2) / total
        before += profile.sizes[index]
    return ranks
