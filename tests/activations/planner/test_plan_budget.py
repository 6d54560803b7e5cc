"""Tests of the quality of plans: near brute force for few storages, and better with larger budgets for many."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from plan_reference import all_plans, front
from planner_profiles import Tiers, at_random, chain, convolutions, decoder, host_for, language_model, limited, u_net

from hf_memopt.activations.pass_recorder import RecordedPass, scaled
from hf_memopt.activations.planner.offload_plan import (
    STEP_TOLERANCE,
    InfeasibleBudgetError,
    OffloadPlan,
    make_plan,
    time_class,
)
from hf_memopt.activations.planner.profile import Action, Profile

# Profiles whose plans for 18 budgets take longer than 5 s.
SLOW = ("convolutions, slow link", "u-net, slow link")
# The allowed step time of a plan, relative to the fastest plan.
FACTOR = 1.03
PROFILES: dict[str, Callable[[], tuple[Profile, float]]] = {
    "equal sizes, fast link": lambda: (chain([2**20] * 17), 3.0),
    "equal sizes, slow link": lambda: (chain([2**20] * 17), 0.1),
    "falling sizes": lambda: (chain([2 ** (24 - i // 6) for i in range(30)]), 2.0),
    "one huge storage": lambda: (chain([2**20] * 40 + [60 * 2**20]), 1.0),
    "decoder": lambda: (decoder(5, 5), 0.25),
    "decoder, fast link": lambda: (decoder(5, 5), 2.0),
    "convolutions": lambda: (convolutions(30), 1.0),
    "convolutions, slow link": lambda: (convolutions(30), 0.2),
    "u-net, slow link": lambda: (u_net(6), 0.2),
    "language model": lambda: (language_model(4, 8192), 1.0),
}


def plan_for(profile: Profile, tiers: Tiers, ahead: int, budget: int | None, **limits: Any) -> OffloadPlan:
    return make_plan(profile, tiers, budget_bytes=budget, **{"max_slowdown": 0.05, "prefetch_ahead": ahead, **limits})


def test_host_budget_is_respected() -> None:
    for seed in range(12):
        profile, tiers, ahead = at_random(seed, 4)
        host = sum(profile.sizes) // 3
        assert plan_for(profile, limited(tiers, host), ahead, None).offloaded_bytes <= host


@pytest.mark.parametrize("seed", range(5))
def test_smallest_budget_is_that_of_brute_force(seed: int) -> None:
    profile, tiers, ahead = at_random(seed, 4)
    with pytest.raises(InfeasibleBudgetError) as error:
        plan_for(profile, tiers, ahead, 0)
    assert error.value.smallest_bytes == front(all_plans(profile, tiers, ahead))[0].peak_bytes


@pytest.mark.sweep(share=0.1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.e2e) if name in SLOW else name for name in PROFILES]
)
def test_larger_budget_is_never_slower_and_moves_less(name: str) -> None:
    """Check that a budget larger by a tenth of all bytes suffices to move less at the same step time."""
    profile, share = PROFILES[name]()
    tiers, total = host_for(profile, share), sum(profile.sizes)
    plans = []
    for part in range(3, 21):
        try:
            plans.append(plan_for(profile, tiers, 2, total * part // 20))
        except InfeasibleBudgetError:
            assert not plans
            continue
        assert plans[-1].predicted_peak_bytes <= total * part // 20
    assert (plans[-1].predicted_step_s, plans[-1].offloaded_bytes) == (profile.step_s, 0)
    assert plans[-1].kept_bytes == total
    for smaller, larger in zip(plans, plans[2:], strict=False):
        before, after = (time_class(profile, plan.predicted_step_s) for plan in (smaller, larger))
        assert after <= before
        if after == before:
            assert larger.offloaded_bytes <= smaller.offloaded_bytes
            assert larger.kept_bytes > smaller.kept_bytes or smaller.kept_bytes == total
            strictly = "slow" not in name  # otherwise copying less makes steps faster
            assert larger.offloaded_bytes < smaller.offloaded_bytes or smaller.offloaded_bytes == 0 or not strictly
    for smaller, larger in itertools.pairwise(plans):
        assert larger.predicted_step_s <= smaller.predicted_step_s + STEP_TOLERANCE * profile.step_s


def test_memory_that_is_left_is_used() -> None:
    """Check a link on which all copies hide: only storages that do not fit move, and a few for the windows."""
    profile = chain([2**20] * 100)
    for part in (30, 50, 80):
        plan = plan_for(profile, host_for(profile, 3.0), 2, part * 2**20)
        assert plan.slowdown <= STEP_TOLERANCE
        assert 100 - part <= plan.offloaded_bytes / 2**20 <= 100 - part + 4


def test_without_a_budget_no_more_is_moved_than_the_peak_needs() -> None:
    profile, tiers, _ = at_random(1, 4)
    plan = plan_for(profile, tiers, 2, None, max_slowdown=0.3)
    slowest = 1.3 * profile.step_s
    fitting = [
        cost
        for cost in all_plans(profile, tiers, 2)
        if cost.step_s <= slowest and cost.peak_bytes <= plan.predicted_peak_bytes
    ]
    assert plan.predicted_step_s <= slowest
    assert plan.predicted_peak_bytes == min(cost.peak_bytes for cost in fitting)
    assert plan.offloaded_bytes <= min(cost.offloaded_bytes for cost in fitting)


def test_limit_of_the_device_counts_where_there_is_no_budget() -> None:
    profile, tiers = decoder(5, 5), host_for(decoder(5, 5), 0.25)
    free = plan_for(profile, tiers, 2, None, max_slowdown=0.02)
    roomy = plan_for(profile, tiers, 2, None, max_slowdown=0.02, device_limit_bytes=free.predicted_peak_bytes)
    assert roomy == free
    limit = free.predicted_peak_bytes - 1
    assert plan_for(profile, tiers, 2, None, max_slowdown=0.02, device_limit_bytes=limit) == plan_for(
        profile, tiers, 2, limit
    )
    budget = sum(profile.sizes) // 2
    assert plan_for(profile, tiers, 2, budget, device_limit_bytes=1) == plan_for(profile, tiers, 2, budget)
    with pytest.raises(InfeasibleBudgetError, match=r"the device has room for 0\.0000 GiB .* at least 0\.\d{4} GiB"):
        plan_for(profile, tiers, 2, None, device_limit_bytes=1)


@pytest.mark.sweep(share=1 / 3)
@pytest.mark.parametrize(
    ("profile", "share", "budget", "slowdown"),
    [(decoder(8, 5), 0.2, 0.12, 0.04), (u_net(4), 0.6, 0.15, 0.2), (u_net(8), 0.2, 0.15, 1.2)],
    ids=["decoder", "u_net", "deep u_net"],
)
def test_tight_budgets_take_a_long_search(profile: Profile, share: float, budget: float, slowdown: float) -> None:
    """Compare with an exhaustive search; a quarter of the simulations gave up to eight times slower plans."""
    plan = plan_for(profile, host_for(profile, share), 2, int(budget * sum(profile.sizes)))
    assert plan.slowdown < slowdown


def test_plan_that_costs_no_time_stays_for_other_times(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, bandwidth = PROFILES["u-net, slow link"]()
    tiers, budget = host_for(profile, 40 * bandwidth), sum(profile.sizes) // 2
    before = plan_for(profile, tiers, 2, budget)
    assert before.slowdown < STEP_TOLERANCE
    assert before.offloaded_bytes
    faster = scaled_times(profile, 0.9)
    expected = plan_for(faster, tiers, 2, budget)
    # No other plan is looked for.
    monkeypatch.setattr("hf_memopt.activations.planner.offload_plan.search_plans", pytest.fail)
    again = plan_for(faster, tiers, 2, budget, before=before)
    assert again.actions == before.actions
    assert again.plain_step_s == faster.step_s
    assert time_class(faster, again.predicted_step_s) == time_class(faster, expected.predicted_step_s)
    assert again.offloaded_bytes == expected.offloaded_bytes


@pytest.mark.parametrize("change", ["copies take longer", "a smaller budget", "other storages", "nothing to recompute"])
def test_plan_before_is_left_where_it_does_not_serve(change: str) -> None:
    profile, bandwidth = PROFILES["decoder"]()
    tiers, budget = host_for(profile, 4 * bandwidth), sum(profile.sizes) // 4
    before = plan_for(profile, tiers, 2, budget)
    if change == "copies take longer":
        profile = scaled_times(profile, 0.1)
    elif change == "a smaller budget":
        budget = before.predicted_peak_bytes - 1
    elif change == "other storages":
        profile = Profile(profile.storages[:-1], profile.step_s)
    else:
        before = dataclasses.replace(before, actions=(Action.RECOMPUTE,) * len(profile.storages))
        storages = tuple(dataclasses.replace(each, recompute_s=None) for each in profile.storages)
        profile = Profile(storages, profile.step_s)
    assert plan_for(profile, tiers, 2, budget, before=before) == plan_for(profile, tiers, 2, budget)


def scaled_times(profile: Profile, ratio: float) -> Profile:
    recording = RecordedPass(profile, tuple(profile.sizes), ("",) * len(profile.sizes))
    return scaled(recording, ratio).profile
