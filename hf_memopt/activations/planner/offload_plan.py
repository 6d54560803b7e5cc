"""Saved storages to keep, to offload and to recompute, so that they fit a budget at the least time; plans as tables.

The search collects the front of peak and step time: the plans that are fastest for their peak. Candidates come from a
price on either resource: recompute the storages that cost least per byte, offload those that live longest or are spread
most evenly, keep the rest, with the thresholds between the three on a grid, and then from moves around each plan on the
front (`search`). Every candidate is simulated (`simulator`). Predicted steps that differ by less than 0.1 % of the
plain step are equally fast: the difference could not be measured. A budget selects from the plans that fit, and memory
that is left is used to copy less (`polish`).

Storages beyond the budget of the nearest memory go to the next one (`candidates.Memories`).

Recomputing by time per byte and hiding copies under compute is Capuchin's idea (Peng et al., ASPLOS 2020); choosing
offloading and recomputation together, with an optimum for chains, is POFO's (Beaumont et al., NeurIPS 2021). Unlike
them this takes any lifetimes and sources, decides for each storage, and models how memory is given up in host order.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

from hf_memopt.activations.planner.candidates import Candidate, Limits, Trials
from hf_memopt.activations.planner.profile import Action, Profile, count_needs
from hf_memopt.activations.planner.search import search_plans
from hf_memopt.text_table import Table
from hf_memopt.transfer.tier import Tier
from hf_memopt.units import GIB, MIB, format_bytes

# One plan, with each way to fill the memories below the device.
_PLANS_FOR_ONE = 2


class InfeasibleBudgetError(ValueError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: the budget.
        smallest_bytes: the smallest budget for which there is a plan.
        is_device_limit: whether the budget is the memory that the device has left.
        rank: rank of the process whose budget it is; None where one trains alone.
    """

    def __init__(
        self, budget_bytes: int, smallest_bytes: int, *, is_device_limit: bool = False, rank: int | None = None
    ) -> None:
        # Rounded up, so that the number shown can be used.
        smallest_gib = -(-smallest_bytes * 10_000 // GIB) / 10_000
        if is_device_limit:
            message = (
                f"the device has room for {budget_bytes / GIB:.4f} GiB of saved activations, and those of this model "
                f"and batch need at least {smallest_gib:.4f} GiB, whatever is offloaded or recomputed; free device "
                "memory or use a smaller batch"
            )
        else:
            message = (
                f"budget_gib={budget_bytes / GIB:.4f} is too small: the saved activations of this model and batch "
                f"need at least budget_gib={smallest_gib:.4f}, whatever is offloaded or recomputed; raise budget_gib "
                "or use a smaller batch"
            )
        super().__init__(message if rank is None else f"rank {rank}: {message}")
        self.budget_bytes, self.smallest_bytes = budget_bytes, smallest_bytes
        self.is_device_limit, self.rank = is_device_limit, rank

    def __reduce__(self) -> tuple[Any, ...]:
        # It travels between processes, and its arguments are not the message.
        remake = partial(type(self), is_device_limit=self.is_device_limit, rank=self.rank)
        return remake, (self.budget_bytes, self.smallest_bytes)


@dataclass(frozen=True)
class OffloadPlan:
    """An action for each storage, and their predicted cost.

    Attributes:
        memories: the number of the memory below the device that each storage goes to if it is offloaded.
        in_flight_bytes: bytes that may wait for their copy from the device before compute waits too.
        prefetch_bytes: bytes that backward fetches ahead of the storage in use.
        reload_order: offloaded storages in the order in which backward first needs them.
        predicted_peak_bytes: the most that saved storages hold of the device.
        predicted_step_s: forward and backward with stalls and recomputation.
        plain_step_s: the same step with everything kept.
        stall_s: compute waiting for copies.
        disk_bytes: of the offloaded ones, those that go to a disk.
    """

    actions: tuple[Action, ...]
    memories: tuple[int, ...]
    in_flight_bytes: int
    prefetch_bytes: int
    reload_order: tuple[int, ...]
    predicted_peak_bytes: int
    predicted_step_s: float
    plain_step_s: float
    stall_s: float
    recompute_s: float
    kept_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int
    disk_bytes: int

    @property
    def slowdown(self) -> float:
        """Return the predicted step time over the plain one's, less 1; 0 if no time was recorded."""
        return self.predicted_step_s / self.plain_step_s - 1 if self.plain_step_s else 0.0

    def summary(self) -> str:
        return (
            f"saved activations: {format_bytes(self.kept_bytes)} kept, {format_bytes(self.offloaded_bytes)} offloaded"
            f"{self._to_disk()}, {format_bytes(self.recomputed_bytes)} recomputed; predicted peak "
            f"{format_bytes(self.predicted_peak_bytes)}, step {1e3 * self.predicted_step_s:.1f} ms "
            f"(+{100 * self.slowdown:.1f} %: {1e3 * self.recompute_s:.1f} ms recomputing, "
            f"{1e3 * self.stall_s:.1f} ms waiting for copies)"
        )

    def _to_disk(self) -> str:
        if not self.disk_bytes:
            return ""
        is_all = self.disk_bytes == self.offloaded_bytes
        return " to disk" if is_all else f" ({format_bytes(self.disk_bytes)} of it to disk)"


def make_plan(
    profile: Profile,
    tiers: Sequence[Tier],
    *,
    budget_bytes: int | None,
    max_slowdown: float,
    prefetch_ahead: int,
    device_limit_bytes: int | None = None,
    before: OffloadPlan | None = None,
) -> OffloadPlan:
    """Return the fastest plan that fits a budget or, without one, the smallest that is fast enough.

    Of equally good plans it is the one that copies least, then the one that recomputes least. The result depends on the
    arguments alone. A larger `budget_bytes` gives a step at most 0.1 % of the plain one slower. Takes tenths of a
    second for ten storages, one second for 100 and more.

    Args:
        profile: saves and uses of one training step.
        tiers: the memories below the device, nearest first, with their budgets and measured bandwidths.
        budget_bytes: bytes that saved storages may hold of the device at any time. None: see `max_slowdown`.
        max_slowdown: without a budget, the accepted increase of step time, as a fraction of the plain step.
        prefetch_ahead: backward fetches ahead at most so many times the largest offloaded storage.
        device_limit_bytes: without a budget, the room of the device: the fastest plan that fits, if that would not.
        before: a plan for other times of the same storages. It stays if it fits the budget and costs no time.

    Raises:
        InfeasibleBudgetError: no plan fits the budgets, or the device.
    """
    is_free = partial(_is_free, profile, budget_bytes)
    if before is not None:
        trials = Trials(profile, tiers, prefetch_ahead, num_left=_PLANS_FOR_ONE)
        candidate = _again(trials, before)
        if candidate is not None and is_free(candidate):  # no other plan is faster
            return _plan(trials, candidate)
    trials = search_plans(profile, tiers, prefetch_ahead, is_free)
    if budget_bytes is not None:
        return _plan(trials, _fastest(trials, budget_bytes))
    smallest = _smallest(trials, (1 + max_slowdown) * profile.step_s)
    if device_limit_bytes is not None and smallest.peak_bytes > device_limit_bytes:
        return _plan(trials, _fastest(trials, device_limit_bytes, is_device_limit=True))
    return _plan(trials, smallest)


def _again(trials: Trials, plan: OffloadPlan) -> Candidate | None:
    """Return a plan for a profile that it was not made for, or None where it does not apply, or the tiers are full."""
    storages = trials.profile.storages
    if len(plan.actions) != len(storages):
        return None
    for action, storage in zip(plan.actions, storages, strict=True):
        if action is Action.RECOMPUTE and storage.recompute_s is None:
            return None
    return trials.evaluate_again(bytes(plan.actions), plan.in_flight_bytes, plan.prefetch_bytes)


def _is_free(profile: Profile, budget_bytes: int | None, candidate: Candidate) -> bool:
    """Return whether there is a budget that a candidate fits, in a step that counts as fast as the plain one."""
    fits = budget_bytes is not None and candidate.peak_bytes <= budget_bytes
    return fits and time_class(profile, candidate.step_s) == time_class(profile, profile.step_s)


def _fastest(trials: Trials, budget_bytes: int, *, is_device_limit: bool = False) -> Candidate:
    profile = trials.profile
    fitting = [candidate for candidate in trials.candidates if candidate.peak_bytes <= budget_bytes]
    if not fitting:
        smallest_bytes = min(candidate.peak_bytes for candidate in trials.candidates)
        raise InfeasibleBudgetError(budget_bytes, smallest_bytes, is_device_limit=is_device_limit)
    fastest = time_class(profile, min(candidate.step_s for candidate in fitting))
    # Polishing must not make a plan faster either: a smaller budget could then give the faster plan, where polishing
    # that of the larger one happens to find nothing.
    limits = Limits(budget_bytes, lambda step_s: time_class(profile, step_s) == fastest)
    # The smallest of the fastest leaves the most room, and is the same for every budget that makes none faster.
    polish(trials, min(trials.within(limits), key=lambda c: (c.peak_bytes, c.step_s)), limits)
    return min(trials.within(limits), key=lambda c: (*moved_bytes(profile, c), c.step_s, c.peak_bytes))


def _smallest(trials: Trials, max_step_s: float) -> Candidate:
    fast = [candidate for candidate in trials.candidates if candidate.step_s <= max_step_s]
    smallest = min(fast, key=lambda candidate: (candidate.peak_bytes, candidate.step_s))
    limits = Limits(smallest.peak_bytes, lambda step_s: step_s <= max_step_s)
    polish(trials, smallest, limits)
    return min(trials.within(limits), key=lambda c: (c.peak_bytes, *moved_bytes(trials.profile, c), c.step_s))


def _plan(trials: Trials, candidate: Candidate) -> OffloadPlan:
    profile, timeline = trials.profile, candidate.timeline
    num_bytes = dict.fromkeys(Action, 0)
    needs = count_needs(profile, candidate.actions)
    for storage, action, count in zip(profile.storages, candidate.actions, needs, strict=True):
        num_bytes[Action(action)] += storage.num_bytes if count or storage.freed_s is not None else 0
    on_disk = [tier.name == "disk" for tier in trials.tiers]
    offloaded = [index for index, action in enumerate(candidate.actions) if action == Action.OFFLOAD]
    return OffloadPlan(
        actions=tuple(Action(action) for action in candidate.actions),
        memories=tuple(candidate.memories),
        in_flight_bytes=candidate.in_flight_bytes,
        prefetch_bytes=candidate.prefetch_bytes,
        reload_order=timeline.reload_order,
        predicted_peak_bytes=timeline.peak_bytes,
        predicted_step_s=timeline.step_s,
        plain_step_s=profile.step_s,
        stall_s=timeline.stall_s,
        recompute_s=timeline.recompute_s,
        kept_bytes=num_bytes[Action.KEEP],
        offloaded_bytes=num_bytes[Action.OFFLOAD],
        recomputed_bytes=num_bytes[Action.RECOMPUTE],
        disk_bytes=sum(profile.sizes[index] for index in offloaded if on_disk[candidate.memories[index]]),
    )


_KEEP, _OFFLOAD, _RECOMPUTE = (int(action) for action in Action)
# Share of the plain step: a tenth of the differences among steps of one plan, and far below the accuracy of times.
STEP_TOLERANCE = 1e-3
# Plans to simulate in polishing one, and their saves and uses in all.
_MAX_PLANS = 200
_MIN_PLANS = 40
_MAX_EVENTS = 100_000
_MAX_HALVINGS = 4


def time_class(profile: Profile, step_s: float) -> float:
    """Return a number that is equal for steps that count as equally fast; "differs by little" is not transitive."""
    width_s = STEP_TOLERANCE * profile.step_s
    return (step_s - profile.step_s) // width_s if width_s else step_s


def moved_bytes(profile: Profile, candidate: Candidate) -> tuple[int, int]:
    needs = count_needs(profile, candidate.actions)
    recomputed = sum(
        size
        for size, action, count in zip(profile.sizes, candidate.actions, needs, strict=True)
        if action == _RECOMPUTE and count
    )
    return candidate.timeline.offloaded_bytes, recomputed


def polish(trials: Trials, candidate: Candidate, limits: Limits) -> None:
    """Try plans that copy less than a candidate, and then recompute less, within limits that it meets itself."""
    num_events = max(1, len(trials.profile.events))
    trials.num_left = max(_MIN_PLANS, min(_MAX_PLANS, _MAX_EVENTS // num_events))
    _Polish(trials, limits).run(candidate)
    trials.num_left = 0


class _Polish:
    def __init__(self, trials: Trials, limits: Limits) -> None:
        self._trials, self._limits, self._profile = trials, limits, trials.profile
        prices, lifetimes_s = self._profile.recompute_s_per_byte, self._profile.lifetimes_s
        self._cheapest = sorted(prices, key=lambda index: (prices[index], lifetimes_s[index]))

    def run(self, candidate: Candidate) -> None:
        # Memory that is left keeps copied storages; time that is left recomputes instead of copying; then recomputed
        # storages are kept as far as both allow.
        candidate = self._keep_offloaded(candidate)
        candidate = self._narrow(candidate)
        recomputed = self._change(candidate, self._cheapest, _OFFLOAD, _RECOMPUTE)
        if recomputed is not candidate:
            candidate = self._narrow(self._keep_offloaded(recomputed))
        self._change(candidate, self._cheapest[::-1], _RECOMPUTE, _KEEP)

    def _keep_offloaded(self, candidate: Candidate) -> Candidate:
        return self._change(candidate, self._profile.soonest_needed, _OFFLOAD, _KEEP)

    def _narrow(self, candidate: Candidate) -> Candidate:
        """Copies that run less far ahead or behind leave room to keep more."""
        in_flight, prefetch = candidate.in_flight_bytes, candidate.prefetch_bytes
        for _ in range(_MAX_HALVINGS):
            for narrower_windows in ((in_flight // 2, prefetch), (in_flight, prefetch // 2)):
                narrower = self._trials.evaluate_like(candidate, candidate.actions, *narrower_windows)
                if narrower is not None and self._limits.allow(narrower) and narrower.peak_bytes < candidate.peak_bytes:
                    candidate = self._keep_offloaded(narrower)
                    in_flight, prefetch = candidate.in_flight_bytes, candidate.prefetch_bytes
        return candidate

    def _change(self, candidate: Candidate, order: Sequence[int], before: int, action: int) -> Candidate:
        """Give an action in place of another to as many storages as the limits allow: with more memory never to fewer.

        First to the longest first part of them; the one that does not fit is left out, and smaller ones follow.
        """
        indices = [index for index in order if candidate.actions[index] == before]
        while indices and self._trials.num_left:
            candidate, count = self._trials.change_first(candidate, indices, action, self._limits.allow)
            room = self._limits.peak_bytes - candidate.peak_bytes
            indices = indices[count + 1 :]
            if action == _KEEP:
                indices = [index for index in indices if self._profile.sizes[index] <= room]
        return candidate


@dataclass(frozen=True)
class SavedBy:
    """Bytes that one kind of module saves, by the plan's action; a star in `owner` stands for a layer's number."""

    owner: str
    kept_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int


@dataclass(frozen=True)
class PlanReport:
    """One plan, and its rows by kind of module, the largest first; `str` makes a table of it."""

    plan: OffloadPlan
    rows: tuple[SavedBy, ...]

    def __str__(self) -> str:
        cells = [[row.owner, *(num_bytes / MIB for num_bytes in astuple(row)[1:])] for row in self.rows]
        table = Table(["saved by (MiB)", "kept", "offloaded", "recomputed"], cells, digits=2)
        return f"{table}\n{self.plan.summary()}"


@dataclass(frozen=True)
class OffloadReport:
    """The plans of an `ActivationOffloader` by kind of module; printing it gives tables.

    Attributes:
        plans: the newest one for each model and device that has one.
        note: why there is none; empty where there is one.
        wear: bytes written to a disk so far, and in a day at that rate; empty without a disk.
    """

    plans: tuple[PlanReport, ...]
    note: str = ""
    wear: str = ""

    def __str__(self) -> str:
        plans = "\n\n".join(map(str, self.plans)) or self.note
        return f"{plans}\n{self.wear}" if self.wear else plans


def plan_report(plan: OffloadPlan, owners: Sequence[str], sizes: Sequence[int]) -> PlanReport:
    rows: defaultdict[str, dict[Action, int]] = defaultdict(lambda: dict.fromkeys(Action, 0))
    for owner, num_bytes, action in zip(owners, sizes, plan.actions, strict=False):
        rows[re.sub(r"\.\d+(?=\.|$)", ".*", owner) or "outside the model"][action] += num_bytes
    largest_first = sorted(rows.items(), key=lambda row: -sum(row[1].values()))
    return PlanReport(plan, tuple(SavedBy(owner, *sums.values()) for owner, sums in largest_first))
