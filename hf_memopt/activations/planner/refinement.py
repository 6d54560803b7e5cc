"""Uses the memory and time that a plan leaves: keeps storages that were copied or recomputed, and copies less."""

from collections.abc import Sequence

from hf_memopt.activations.planner.candidates import Candidate, Limits, Trials
from hf_memopt.activations.planner.profile import Action, Profile, count_needs

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
