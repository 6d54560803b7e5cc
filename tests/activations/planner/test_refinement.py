"""Tests that memory and time left by a plan are used to copy less, within the plan's own limits."""

import math

import pytest
from plan_reference import Cost, all_plans
from planner_profiles import at_random, chain, host

from hf_memopt.activations.planner.candidates import CopyWindow, Limits, Trials
from hf_memopt.activations.planner.offload_plan import make_plan, moved_bytes, polish, time_class
from hf_memopt.activations.planner.profile import Action, Profile, SavedStorage

KEEP, OFFLOAD, RECOMPUTE = (int(action) for action in Action)


def test_steps_in_a_thousandth_count_as_equally_fast() -> None:
    profile = Profile((), 8.0)
    assert time_class(profile, 8.0) == time_class(profile, 8.007) == 0
    assert time_class(profile, 8.009) == 1


def test_moved_bytes_are_those_copied_and_those_made_again() -> None:
    profile = Profile((SavedStorage(10, 0.0, (9.0,)), SavedStorage(20, 1.0, (8.0,), 0.5)), 10.0)
    trials = Trials(profile, host(100.0, 100.0), 0, num_left=1)
    assert moved_bytes(profile, trials.evaluate(bytes([OFFLOAD, RECOMPUTE]), CopyWindow(0.0, 0))) == (10, 20)


def test_what_fits_is_kept() -> None:
    """Check a plan that offloads ten equal storages, nine of which have room, one after the other."""
    trials = Trials(chain([100] * 10), host(1e9, 1e9), 0, num_left=1)
    everything = trials.evaluate(bytes([OFFLOAD] * 10), CopyWindow(0.0, 0))
    limits = Limits(900, lambda step_s: True)
    polish(trials, everything, limits)
    assert min(candidate.actions.count(OFFLOAD) for candidate in trials.within(limits)) == 1
    assert trials.num_left == 0


def least_moved(costs: list[Cost], profile: Profile, budget: int, step_s: float) -> float:
    """Return the fewest bytes moved by a plan that fits and is as fast, infinity without such a plan."""
    slowest = time_class(profile, step_s)
    fitting = [c for c in costs if c.peak_bytes <= budget and time_class(profile, c.step_s) <= slowest]
    return min((cost.offloaded_bytes for cost in fitting), default=math.inf)


@pytest.mark.parametrize(("num_storages", "num_cases"), [(3, 30), (4, 12), (5, 3)])
@pytest.mark.sweep(share=0.3)
def test_moves_no_more_than_brute_force(num_storages: int, num_cases: int) -> None:
    """Check for at most a twentieth of all bytes more on average, and mostly for none more."""
    for seed in range(num_cases):
        profile, tiers, ahead = at_random(seed, num_storages)
        costs = all_plans(profile, tiers, ahead)
        smallest, total = min(cost.peak_bytes for cost in costs), sum(profile.sizes)
        excesses = []
        for part in range(5):
            budget = smallest + part * (total - smallest) // 4
            plan = make_plan(profile, tiers, budget_bytes=budget, max_slowdown=0.05, prefetch_ahead=ahead)
            least = least_moved(costs, profile, budget, plan.predicted_step_s)
            excesses.append(max(0, plan.offloaded_bytes - least))
        assert sum(excesses) <= total / 20 * len(excesses)
