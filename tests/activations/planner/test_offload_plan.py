"""The planner: predictions equal closed forms, and plans are what they say. How good they are: test_plan_budget.py."""

import planner_profiles
import pytest

from hf_memopt.activations.planner.offload_plan import InfeasibleBudgetError, Plan, make_plan
from hf_memopt.activations.planner.simulator import Action, Link, Profile, SavedStorage, Timeline, simulate

KEEP, OFFLOAD, RECOMPUTE = Action
LINK = Link(to_host_bytes_per_s=100.0, to_device_bytes_per_s=50.0)


def run(
    storages: list[SavedStorage], actions: list[Action], step_s: float = 10.0, in_flight: int = 0, prefetch: int = 0
) -> Timeline:
    return simulate(Profile(tuple(storages), step_s), actions, LINK, in_flight_bytes=in_flight, prefetch_bytes=prefetch)


# ------------------------------------------------------------------------------------------------ closed forms


def test_all_kept_costs_memory_alone() -> None:
    storages = [SavedStorage(100, 1.0, (9.0,)), SavedStorage(30, 2.0, (8.0, 9.5)), SavedStorage(7, 3.0, (7.0,))]
    assert run(storages, [KEEP] * 3) == Timeline(137, 10.0, 0.0, 0.0, (), 0)


def test_freed_memory_makes_room_only_after_the_node_that_used_it() -> None:
    used_together = [SavedStorage(100, 1.0, (5.0,)), SavedStorage(100, 5.0, (6.0,))]
    assert run(used_together, [KEEP, KEEP]).peak_bytes == 200
    used_before = [SavedStorage(100, 1.0, (4.9,)), SavedStorage(100, 5.0, (6.0,))]
    assert run(used_before, [KEEP, KEEP]).peak_bytes == 100


def test_synchronous_offload_stalls_for_both_copies() -> None:
    result = run([SavedStorage(100, 1.0, (9.0,))], [OFFLOAD])
    assert result == Timeline(100, 10 + 100 / 100 + 100 / 50, 3.0, 0.0, (0,), 100)


def test_copy_that_ends_with_forward_is_free() -> None:
    """The second save pushes the first out exactly when its copy ends; what prefetches its reload has time enough."""
    storages = [SavedStorage(100, 1.0, (9.0,)), SavedStorage(10, 2.0, (7.0,))]
    result = run(storages, [OFFLOAD, OFFLOAD], in_flight=100, prefetch=100)
    assert result.stall_s == 0
    assert result.peak_bytes == 110
    assert result.reload_order == (1, 0)


def test_copy_that_is_late_for_forward_stalls_by_the_difference() -> None:
    storages = [SavedStorage(100, 1.0, (9.0,)), SavedStorage(10, 1.75, (7.0,))]
    assert run(storages, [OFFLOAD, OFFLOAD], in_flight=100, prefetch=100).stall_s == 0.25


def test_two_storages_share_the_queue_to_the_host() -> None:
    """Both saved at 1: copies end at 2 and 3. The third save, at 1.5, waits for both: 1.5 s. Reloads: 2 s each."""
    storages = [SavedStorage(100, 1.0, (9.0,)), SavedStorage(100, 1.0, (8.0,)), SavedStorage(1, 1.5, (7.0,))]
    result = run(storages, [OFFLOAD, OFFLOAD, KEEP], in_flight=200)
    assert result.stall_s == 0  # nothing pushes them out
    assert result.peak_bytes == 201
    result = run([*storages[:2], SavedStorage(200, 1.5, (7.0,))], [OFFLOAD] * 3, in_flight=200)
    assert result.stall_s == 1.5 + 2 + 2


def test_two_reloads_share_the_queue_to_the_device() -> None:
    """Storage 2 is used at 6 and starts its own reload and the others."""
    storages = [SavedStorage(100, 1.0, (8.0,)), SavedStorage(100, 2.0, (7.0,)), SavedStorage(100, 4.0, (6.0,))]
    result = run(storages, [OFFLOAD] * 3, in_flight=100, prefetch=200)
    assert result.reload_order == (2, 1, 0)
    assert result.stall_s == 1 + 1


def test_prefetching_stops_at_its_bound() -> None:
    storages = [SavedStorage(100, 1.0, (8.0,)), SavedStorage(100, 2.0, (7.0,)), SavedStorage(100, 4.0, (6.0,))]
    assert run(storages, [OFFLOAD] * 3, in_flight=100, prefetch=100).stall_s == 1 + 1
    assert run(storages, [OFFLOAD] * 3, in_flight=100, prefetch=99).stall_s == 2 + 2


def test_what_never_left_is_used_in_place() -> None:
    result = run([SavedStorage(100, 1.0, (1.1, 9.0))], [OFFLOAD], in_flight=100)
    assert result == Timeline(100, 10.0, 0.0, 0.0, (0,), 100)


def test_recomputation_costs_its_time_and_memory_from_the_use_on() -> None:
    storages = [SavedStorage(100, 1.0, (9.0,), recompute_s=0.5), SavedStorage(30, 2.0, (8.0,))]
    assert run(storages, [RECOMPUTE, KEEP]) == Timeline(100, 10.5, 0.0, 0.5, (), 0)


def test_chain_is_recomputed_once_and_stays() -> None:
    """0 is read to make 1, 1 to make 2. The use of 2 makes 1 too, which then waits for its own use."""
    storages = [
        SavedStorage(10, 1.0, (9.0,)),
        SavedStorage(20, 2.0, (8.0,), recompute_s=0.25, sources=(0,)),
        SavedStorage(40, 3.0, (7.0,), recompute_s=0.5, sources=(1,)),
    ]
    assert run(storages, [KEEP, RECOMPUTE, RECOMPUTE]) == Timeline(70, 10.75, 0.0, 0.75, (), 0)
    assert run(storages, [KEEP, RECOMPUTE, KEEP]) == Timeline(50, 10.25, 0.0, 0.25, (), 0)


def test_offloaded_source_is_reloaded_when_a_dependent_needs_it() -> None:
    storages = [
        SavedStorage(100, 1.0, (9.0,)),
        SavedStorage(10, 2.0, (8.0,)),
        SavedStorage(20, 3.0, (7.0,), recompute_s=0.25, sources=(0,)),
    ]
    result = run(storages, [OFFLOAD, OFFLOAD, RECOMPUTE])
    assert result.reload_order == (0, 1)
    assert result.stall_s == pytest.approx((100 + 10) / 100 + (100 + 10) / 50)  # sums of tenths round
    assert result.peak_bytes == 120


def test_long_chain_needs_no_deep_stack() -> None:
    storages = [SavedStorage(1, 0.0, (9.0,))]
    storages += [SavedStorage(1, 1.0, (5.0,), recompute_s=0.125, sources=(i,)) for i in range(4000)]
    assert run(storages, [KEEP, *[RECOMPUTE] * 4000]).recompute_s == 500.0
    assert run(storages[::1], [KEEP, *[RECOMPUTE] * 4000]).peak_bytes == 4001


@pytest.mark.parametrize("action", [KEEP, OFFLOAD, RECOMPUTE])
def test_source_that_nobody_is_recomputed_from_costs_nothing(action: Action) -> None:
    storages = [SavedStorage(100, 1.0, (), recompute_s=1.0), SavedStorage(10, 2.0, (8.0,), 0.5, (0,))]
    assert run(storages, [action, KEEP]) == Timeline(10, 10.0, 0.0, 0.0, (), 0)


def test_source_only_storage_costs_what_its_action_says() -> None:
    storages = [SavedStorage(100, 1.0, (), recompute_s=1.0), SavedStorage(10, 2.0, (8.0,), 0.5, (0,))]
    assert run(storages, [KEEP, RECOMPUTE]) == Timeline(110, 10.5, 0.0, 0.5, (), 0)
    assert run(storages, [OFFLOAD, RECOMPUTE]) == Timeline(110, 13.5, 3.0, 0.5, (0,), 100)
    assert run(storages, [RECOMPUTE, RECOMPUTE]) == Timeline(110, 11.5, 0.0, 1.5, (), 0)


def test_source_of_an_idle_source_costs_nothing() -> None:
    storages = [
        SavedStorage(100, 1.0, ()),
        SavedStorage(50, 1.5, (), 1.0, (0,)),
        SavedStorage(10, 2.0, (8.0,), 0.5, (1,)),
    ]
    assert run(storages, [KEEP, RECOMPUTE, KEEP]) == Timeline(10, 10.0, 0.0, 0.0, (), 0)


def test_recomputation_hides_a_reload() -> None:
    """2 is used at 7 and reloaded in 1 s, 1 in the 2 s after that: 1 s of compute and 1 s of recomputing 0."""
    storages = [SavedStorage(1, 1.0, (8.0,), 1.0), SavedStorage(100, 1.0, (8.0,)), SavedStorage(50, 2.0, (7.0,))]
    result = run(storages, [RECOMPUTE, OFFLOAD, OFFLOAD], prefetch=100)
    assert result.stall_s == (100 + 50) / 100 + 1


def test_needs_of_one_node_are_held_together() -> None:
    together = [SavedStorage(100, 1.0, (8.0,), 0.5), SavedStorage(50, 2.0, (8.0,), 0.5)]
    apart = [SavedStorage(100, 1.0, (8.0,), 0.5), SavedStorage(50, 2.0, (7.0,), 0.5)]
    assert run(together, [RECOMPUTE] * 2).peak_bytes == 150
    assert run(apart, [RECOMPUTE] * 2).peak_bytes == 100


# ------------------------------------------------------------------------------------------------ wrong input


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"saved_at_s=3\.0 is after its first need at 2\.0"):
        Profile((SavedStorage(1, 3.0, (2.0,)),), 4.0)
    with pytest.raises(ValueError, match="names a storage that does not exist"):
        Profile((SavedStorage(1, 1.0, (2.0,), 0.1, (1,)),), 4.0)
    with pytest.raises(ValueError, match="cycle"):
        Profile((SavedStorage(1, 1.0, (2.0,), 0.1, (1,)), SavedStorage(1, 1.0, (2.0,), 0.1, (0,))), 4.0)
    with pytest.raises(ValueError, match="to_device_bytes_per_s must be positive, got 0"):
        Link(1.0, 0.0)
    with pytest.raises(ValueError, match="recompute_s=None"):
        run([SavedStorage(1, 1.0, (2.0,))], [RECOMPUTE])
    with pytest.raises(ValueError, match="2 entries for 1 storages"):
        run([SavedStorage(1, 1.0, (2.0,))], [KEEP, KEEP])
    with pytest.raises(ValueError, match=r"max_slowdown must not be negative, got -0\.1"):
        make_plan(Profile((), 1.0), LINK, budget_bytes=None, max_slowdown=-0.1, prefetch_ahead=2)


# ------------------------------------------------------------------------------------------------ plans


def plan_for(profile: Profile, link: Link, ahead: int, budget: int | None) -> Plan:
    return make_plan(profile, link, budget_bytes=budget, max_slowdown=0.05, prefetch_ahead=ahead)


@pytest.fixture(scope="module")
def decoder() -> Profile:
    return planner_profiles.decoder(num_layers=5, kinds=5)


@pytest.fixture(scope="module")
def decoder_link(decoder: Profile) -> Link:
    return Link(sum(decoder.sizes) / 4, sum(decoder.sizes) / 4)  # a quarter fits through during forward


def test_plan_is_what_its_simulation_says(decoder: Profile, decoder_link: Link) -> None:
    budget = sum(decoder.sizes) // 5
    plan = plan_for(decoder, decoder_link, 2, budget)
    assert plan.predicted_peak_bytes <= budget
    result = simulate(
        decoder, plan.actions, decoder_link, in_flight_bytes=plan.in_flight_bytes, prefetch_bytes=plan.prefetch_bytes
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


def test_better_than_either_remedy_alone(decoder: Profile, decoder_link: Link) -> None:
    """At the memory that full recomputation holds, and at what offloading everything holds."""
    recompute = [KEEP if s.recompute_s is None else RECOMPUTE for s in decoder.storages]
    for actions in (recompute, [OFFLOAD] * len(recompute)):
        alone = simulate(decoder, actions, decoder_link, in_flight_bytes=2**24, prefetch_bytes=6 * 2**20)
        assert plan_for(decoder, decoder_link, 2, alone.peak_bytes).predicted_step_s < 0.98 * alone.step_s


def test_without_a_budget_the_slowdown_decides(decoder: Profile, decoder_link: Link) -> None:
    plan = plan_for(decoder, decoder_link, 2, None)
    assert plan.slowdown <= 0.05
    assert plan.predicted_peak_bytes < 0.6 * sum(decoder.sizes)
    with_its_peak = plan_for(decoder, decoder_link, 2, plan.predicted_peak_bytes)
    assert with_its_peak.slowdown <= plan.slowdown + 0.02  # polished for another end


def test_prefetching_stays_within_what_was_allowed(decoder: Profile, decoder_link: Link) -> None:
    for ahead in (0, 3):
        plan = plan_for(decoder, decoder_link, ahead, sum(decoder.sizes) // 6)
        offloaded = [s for s, action in zip(decoder.sizes, plan.actions, strict=True) if action == OFFLOAD]
        assert offloaded
        assert plan.prefetch_bytes <= ahead * max(offloaded)


def test_infeasible_budget_names_the_smallest_one(decoder: Profile, decoder_link: Link) -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"budget_gib=0\.0000 is too small.*budget_gib=0\.\d{4}") as error:
        plan_for(decoder, decoder_link, 2, 1000)
    shown_gib = float(str(error.value).split("budget_gib=")[2].split(",")[0])
    assert error.value.smallest_bytes <= shown_gib * 2**30
    plan = plan_for(decoder, decoder_link, 2, error.value.smallest_bytes)
    assert plan.predicted_peak_bytes == error.value.smallest_bytes


def test_profile_without_storages() -> None:
    plan = plan_for(Profile((), 1.0), LINK, 2, 0)
    assert (plan.actions, plan.predicted_step_s, plan.predicted_peak_bytes) == ((), 1.0, 0)


def test_summary_is_one_line_with_units() -> None:
    plan = Plan((), 0, 0, (), 2**30, 1.1, 1.0, 0.06, 0.04, 2**29, 2**31, 2**28)
    assert plan.summary() == (
        "saved activations: 512.00 MiB kept, 2.00 GiB offloaded, 256.00 MiB recomputed; predicted peak 1.00 GiB, "
        "step 1100.0 ms (+10.0 %: 40.0 ms recomputing, 60.0 ms waiting for copies)"
    )
