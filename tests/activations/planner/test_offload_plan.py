"""Tests that plans equal their simulations. test_plan_budget.py tests their quality."""

import pickle

import planner_profiles
import pytest
from planner_profiles import Tiers, host

from hf_memopt.activations.planner.offload_plan import InfeasibleBudgetError, OffloadPlan, make_plan
from hf_memopt.activations.planner.profile import Action, Profile
from hf_memopt.activations.planner.simulator import Timeline, simulate

KEEP, OFFLOAD, RECOMPUTE = Action
HOST = host(write_bytes_per_s=100.0, read_bytes_per_s=50.0)


def plan_for(profile: Profile, tiers: Tiers, ahead: int, budget: int | None) -> OffloadPlan:
    return make_plan(profile, tiers, budget_bytes=budget, max_slowdown=0.05, prefetch_ahead=ahead)


@pytest.fixture(scope="module")
def decoder() -> Profile:
    return planner_profiles.decoder(num_layers=5, kinds=5)


@pytest.fixture(scope="module")
def decoder_tiers(decoder: Profile) -> Tiers:
    return host(sum(decoder.sizes) / 4, sum(decoder.sizes) / 4)  # forward covers a quarter of the bytes


def test_plan_is_what_its_simulation_says(decoder: Profile, decoder_tiers: Tiers) -> None:
    budget = sum(decoder.sizes) // 5
    plan = plan_for(decoder, decoder_tiers, 2, budget)
    assert plan.predicted_peak_bytes <= budget
    result = simulate(
        decoder, plan.actions, decoder_tiers, in_flight_bytes=plan.in_flight_bytes, prefetch_bytes=plan.prefetch_bytes
    )
    assert result == Timeline(
        plan.predicted_peak_bytes,
        plan.predicted_step_s,
        plan.stall_s,
        plan.recompute_s,
        plan.reload_order,
        plan.offloaded_bytes,
    )
    assert plan.kept_bytes + plan.offloaded_bytes + plan.recomputed_bytes == sum(decoder.sizes)
    assert set(plan.actions) == set(Action)


def test_better_than_either_remedy_alone(decoder: Profile, decoder_tiers: Tiers) -> None:
    """Compare at the peak of full recomputation, and at the peak of offloading everything."""
    recompute = [KEEP if s.recompute_s is None else RECOMPUTE for s in decoder.storages]
    for actions in (recompute, [OFFLOAD] * len(recompute)):
        alone = simulate(decoder, actions, decoder_tiers, in_flight_bytes=2**24, prefetch_bytes=6 * 2**20)
        assert plan_for(decoder, decoder_tiers, 2, alone.peak_bytes).predicted_step_s < 0.98 * alone.step_s


def test_without_a_budget_the_slowdown_decides(decoder: Profile, decoder_tiers: Tiers) -> None:
    plan = plan_for(decoder, decoder_tiers, 2, None)
    assert plan.slowdown <= 0.05
    assert plan.predicted_peak_bytes < 0.6 * sum(decoder.sizes)
    with_its_peak = plan_for(decoder, decoder_tiers, 2, plan.predicted_peak_bytes)
    assert with_its_peak.slowdown <= plan.slowdown + 0.02  # polished for another limit


def test_prefetching_stays_within_what_was_allowed(decoder: Profile, decoder_tiers: Tiers) -> None:
    for ahead in (0, 3):
        plan = plan_for(decoder, decoder_tiers, ahead, sum(decoder.sizes) // 6)
        offloaded = [s for s, action in zip(decoder.sizes, plan.actions, strict=True) if action == OFFLOAD]
        assert offloaded
        assert plan.prefetch_bytes <= ahead * max(offloaded)


def test_infeasible_budget_names_the_smallest_one(decoder: Profile, decoder_tiers: Tiers) -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"budget_gib=0\.0000 is too small.*budget_gib=0\.\d{4}") as error:
        plan_for(decoder, decoder_tiers, 2, 1000)
    shown_gib = float(str(error.value).split("budget_gib=")[2].split(",")[0])
    assert error.value.smallest_bytes <= shown_gib * 2**30
    plan = plan_for(decoder, decoder_tiers, 2, error.value.smallest_bytes)
    assert plan.predicted_peak_bytes == error.value.smallest_bytes
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.smallest_bytes) == (str(error.value), error.value.smallest_bytes)


def test_the_rank_comes_first_in_the_error_and_survives_a_pickle() -> None:
    again = pickle.loads(pickle.dumps(InfeasibleBudgetError(100, 200, rank=3)))
    assert str(again).startswith("rank 3: budget_gib=")
    assert again.rank == 3


def test_profile_without_storages() -> None:
    plan = plan_for(Profile((), 1.0), HOST, 2, 0)
    assert (plan.actions, plan.predicted_step_s, plan.predicted_peak_bytes) == ((), 1.0, 0)


def test_summary_is_one_line_with_units() -> None:
    plan = OffloadPlan((), (), 0, 0, (), 2**30, 1.1, 1.0, 0.06, 0.04, 2**29, 2**31, 2**28, 0)
    assert plan.summary() == (
        "saved activations: 512.00 MiB kept, 2.00 GiB offloaded, 256.00 MiB recomputed; predicted peak 1.00 GiB, "
        "step 1100.0 ms (+10.0 %: 40.0 ms recomputing, 60.0 ms waiting for copies)"
    )
