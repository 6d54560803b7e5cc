"""Tests of the search: near brute force for few storages, and bounded for many."""

from typing import Any

import pytest
from plan_reference import all_plans, front
from planner_profiles import Tiers, at_random, chain, decoder, host_for, limited

from hf_memopt.activations.planner import candidates
from hf_memopt.activations.planner.offload_plan import make_plan
from hf_memopt.activations.planner.profile import Action, Profile
from hf_memopt.activations.planner.search import search_plans
from hf_memopt.activations.planner.simulator import Timeline, simulate

# The allowed step time of a plan, relative to the fastest plan.
FACTOR = 1.03


def check_against_brute_force(profile: Profile, tiers: Tiers, ahead: int) -> None:
    """Compare at the tightest budget of each possible step time, where plans are hardest to find."""
    costs = all_plans(profile, tiers, ahead)
    fastest = front(costs)
    candidates = search_plans(profile, tiers, ahead).candidates
    assert min(candidate.peak_bytes for candidate in candidates) == fastest[0].peak_bytes
    for cost in fastest:
        step_s = min(candidate.step_s for candidate in candidates if candidate.peak_bytes <= cost.peak_bytes)
        assert step_s <= FACTOR * cost.step_s


@pytest.mark.parametrize(("num_storages", "num_cases"), [(1, 20), (2, 60), (3, 60), (4, 16), (5, 4)])
@pytest.mark.sweep(share=0.4)
def test_nearly_as_fast_as_brute_force(num_storages: int, num_cases: int) -> None:
    for seed in range(num_cases):
        check_against_brute_force(*at_random(seed, num_storages))


@pytest.mark.slow
@pytest.mark.parametrize(("num_storages", "seed"), [(6, 1), (6, 3), (7, 0), (7, 1)])
def test_nearly_as_fast_as_brute_force_for_more(num_storages: int, seed: int) -> None:
    check_against_brute_force(*at_random(seed, num_storages))


def test_nearly_as_fast_as_brute_force_with_little_host_memory() -> None:
    for seed in range(12):
        profile, tiers, ahead = at_random(seed, 4)
        check_against_brute_force(profile, limited(tiers, sum(profile.sizes) // 3), ahead)


@pytest.mark.parametrize(
    ("profile", "share", "max_plans", "max_events"),
    [
        (chain([2**20] * 17), 0.1, 700, 25_000),
        (decoder(6, 25), 0.25, 1_550, 500_000),
        pytest.param(decoder(36, 55), 0.25, 250, 900_000, marks=pytest.mark.slow),
    ],
    ids=["17", "150", "1980"],
)
def test_simulations_are_bounded(
    profile: Profile, share: float, max_plans: int, max_events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_plans = num_events = 0

    def counting(profile: Profile, *rest: Any, **windows: Any) -> Timeline:
        nonlocal num_plans, num_events
        num_plans, num_events = num_plans + 1, num_events + len(profile.events)
        return simulate(profile, *rest, **windows)

    monkeypatch.setattr(candidates, "simulate", counting)
    tiers = host_for(profile, share)
    budget = sum(profile.sizes) // 5
    plan = make_plan(profile, tiers, budget_bytes=budget, max_slowdown=0.05, prefetch_ahead=2)
    assert num_plans <= max_plans
    assert num_events <= max_events
    everything = [Action.OFFLOAD if s.recompute_s is None else Action.RECOMPUTE for s in profile.storages]
    simplest = simulate(profile, everything, tiers, in_flight_bytes=0, prefetch_bytes=0)
    assert plan.slowdown < 0.9 * (simplest.step_s / profile.step_s - 1)
