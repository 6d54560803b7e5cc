"""Tests of plans with a disk below the host: budgets of both, near brute force, no wait that recomputing avoids."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from plan_reference import all_plans, fits, front
from planner_profiles import Tiers, at_random, chain, decoder, host, host_for, u_net, with_disk

from hf_memopt.activations.planner.candidates import Memories
from hf_memopt.activations.planner.offload_plan import STEP_TOLERANCE, InfeasibleBudgetError, OffloadPlan, make_plan
from hf_memopt.activations.planner.profile import Action, Profile
from hf_memopt.activations.planner.search import search_plans
from hf_memopt.activations.planner.simulator import simulate

KEEP, OFFLOAD, RECOMPUTE = (int(action) for action in Action)
# The allowed step time of a plan, relative to the fastest plan.
FACTOR = 1.03
TWO_PAGES = 8192


def with_disk_at_random(seed: int, num_storages: int) -> tuple[Profile, Tiers, int]:
    """Return a random profile, host memory for none to half of its bytes, a disk, and how far to prefetch ahead."""
    profile, tiers, ahead = at_random(seed, num_storages)
    lots, total = random.Random(seed), sum(profile.sizes)
    host_bytes = lots.choice([0, total // 4, total // 2])
    disk_bytes = lots.choice([None, total // 2, total + TWO_PAGES * num_storages])
    return profile, with_disk(tiers, lots.choice([0.1, 0.25, 0.5, 1.0]), host_bytes, disk_bytes), ahead


def plans(profile: Profile, tiers: Tiers, ahead: int) -> Iterator[tuple[int, OffloadPlan]]:
    """Yield budgets, smallest first, with their plans."""
    for part in range(2, 20, 3):
        budget = sum(profile.sizes) * part // 20
        try:
            plan = make_plan(profile, tiers, budget_bytes=budget, max_slowdown=0.05, prefetch_ahead=ahead)
        except InfeasibleBudgetError:
            continue
        yield budget, plan


def offloaded(plan: OffloadPlan) -> list[int]:
    return [index for index, action in enumerate(plan.actions) if action is Action.OFFLOAD]


@pytest.mark.parametrize(("num_storages", "num_cases"), [(3, 15), (5, 6), (8, 5)])
@pytest.mark.sweep(share=0.3)
def test_budgets_of_both_hold_in_every_plan(num_storages: int, num_cases: int) -> None:
    num_on_disk = 0
    for seed in range(num_cases):
        profile, tiers, ahead = with_disk_at_random(seed, num_storages)
        for candidate in search_plans(profile, tiers, ahead).candidates:
            moved = [index for index, action in enumerate(candidate.actions) if action == OFFLOAD]
            assert fits(profile, tiers, moved, candidate.memories)
        for budget, plan in plans(profile, tiers, ahead):
            assert plan.predicted_peak_bytes <= budget
            assert fits(profile, tiers, offloaded(plan), plan.memories)
            on_disk = [index for index in offloaded(plan) if plan.memories[index] == 1]
            assert plan.disk_bytes == sum(profile.sizes[index] for index in on_disk)
            num_on_disk += len(on_disk)
    assert num_on_disk > 0


def test_a_plan_is_the_simulation_of_its_memories() -> None:
    profile = decoder(5, 5)
    tiers = with_disk(host_for(profile, 0.5), 0.5, sum(profile.sizes) // 5)
    budget = sum(profile.sizes) // 5
    plan = make_plan(profile, tiers, budget_bytes=budget, max_slowdown=0.05, prefetch_ahead=2)
    assert 0 < plan.disk_bytes < plan.offloaded_bytes
    windows = {"in_flight_bytes": plan.in_flight_bytes, "prefetch_bytes": plan.prefetch_bytes}
    timeline = simulate(profile, plan.actions, tiers, memories=plan.memories, **windows)
    assert (timeline.step_s, timeline.stall_s) == (plan.predicted_step_s, plan.stall_s)
    slowest = simulate(profile, plan.actions, tiers, memories=bytes([1] * len(plan.actions)), **windows)
    assert slowest.step_s > plan.predicted_step_s


@pytest.mark.parametrize("seed", range(5))
def test_all_goes_to_the_disk_where_the_host_has_nothing_left(seed: int) -> None:
    profile, tiers, ahead = at_random(seed, 6)
    below = with_disk(tiers, 0.5, host_bytes=0)
    for candidate in search_plans(profile, below, ahead).candidates:
        assert all(candidate.memories[i] == 1 for i, action in enumerate(candidate.actions) if action == OFFLOAD)
    for _, plan in plans(profile, below, ahead):
        assert plan.disk_bytes == plan.offloaded_bytes


def test_nothing_goes_to_the_disk_that_the_host_has_room_for() -> None:
    for seed in range(15):
        profile, tiers, ahead = with_disk_at_random(seed, 5)
        for candidate in search_plans(profile, tiers, ahead).candidates:
            moved = [index for index, action in enumerate(candidate.actions) if action == OFFLOAD]
            room = tiers[0].budget_bytes - sum(profile.sizes[i] for i in moved if candidate.memories[i] == 0)
            assert all(profile.sizes[i] > room for i in moved if candidate.memories[i] == 1)


def assigned(profile: Profile, tiers: Tiers, actions: list[int]) -> list[list[int]]:
    return [list(memories) for memories in Memories(profile, tiers).assignments(bytes(actions))]


def test_the_largest_fill_the_host_or_some_from_everywhere() -> None:
    profile = chain([30, 10, 20, 40])
    below = with_disk(host(100.0, 100.0), 0.5, host_bytes=50)
    assert assigned(profile, below, [OFFLOAD] * 4) == [[1, 0, 1, 0]]  # in both orders
    equal = chain([10] * 6)
    first_ones, spread = assigned(equal, with_disk(host(100.0, 100.0), 0.5, host_bytes=30), [OFFLOAD] * 6)
    assert first_ones == [0, 0, 0, 1, 1, 1]
    assert spread == [1, 0, 1, 0, 0, 1]  # by multiples of the golden ratio, without their whole parts
    assert assigned(profile, below, [OFFLOAD, KEEP, OFFLOAD, KEEP]) == [[0, 0, 0, 0]]


def test_there_is_no_assignment_without_room() -> None:
    profile, everything = chain([30, 10, 20, 40]), [OFFLOAD] * 4
    assert assigned(profile, host(100.0, 100.0, budget_bytes=99), everything) == []
    assert assigned(profile, with_disk(host(100.0, 100.0), 0.5, 50, 2 * TWO_PAGES + 49), everything) == []
    assert assigned(profile, with_disk(host(100.0, 100.0), 0.5, 50, 2 * TWO_PAGES + 50), everything) != []
    assert assigned(profile, host(100.0, 100.0, budget_bytes=100), everything) == [[0] * 4]


@pytest.mark.parametrize(("num_storages", "num_cases"), [(2, 40), (3, 40), (4, 12), (5, 4)])
def test_nearly_as_fast_as_brute_force(num_storages: int, num_cases: int) -> None:
    """Compare at the tightest budget of each possible step time, over all actions, memories and windows."""
    for seed in range(num_cases):
        profile, tiers, ahead = with_disk_at_random(seed, num_storages)
        fastest = front(all_plans(profile, tiers, ahead))
        candidates = search_plans(profile, tiers, ahead).candidates
        assert min(candidate.peak_bytes for candidate in candidates) == fastest[0].peak_bytes
        for cost in fastest:
            step_s = min(each.step_s for each in candidates if each.peak_bytes <= cost.peak_bytes)
            assert step_s <= FACTOR * cost.step_s


@pytest.mark.parametrize(("num_storages", "num_cases"), [(4, 16), (8, 12), (14, 4)])
@pytest.mark.sweep(share=0.3)
def test_no_plan_waits_for_copies_where_recomputing_is_faster(num_storages: int, num_cases: int) -> None:
    num_waiting = 0
    for seed in range(num_cases):
        profile, tiers, ahead = with_disk_at_random(seed, num_storages)
        for budget, plan in plans(profile, tiers, ahead):
            num_waiting += plan.stall_s > 0
            for index in offloaded(plan):
                if profile.storages[index].recompute_s is not None:
                    peak_bytes, step_s = recomputing(index, plan, profile, tiers)
                    is_faster = step_s < plan.predicted_step_s - STEP_TOLERANCE * profile.step_s
                    assert peak_bytes > budget or not is_faster
    assert num_waiting > 0


def recomputing(index: int, plan: OffloadPlan, profile: Profile, tiers: Tiers) -> tuple[int, float]:
    """Return peak and step of a plan that recomputes one storage more."""
    actions = [*plan.actions[:index], RECOMPUTE, *plan.actions[index + 1 :]]
    windows = {"in_flight_bytes": plan.in_flight_bytes, "prefetch_bytes": plan.prefetch_bytes}
    timeline = simulate(profile, actions, tiers, memories=plan.memories, **windows)
    return timeline.peak_bytes, timeline.step_s


@pytest.mark.parametrize("profile", [chain([2**20] * 17), decoder(5, 5), u_net(4)], ids=["chain", "decoder", "u_net"])
@pytest.mark.sweep(share=0.3)
def test_larger_budgets_are_never_slower(profile: Profile) -> None:
    total = sum(profile.sizes)
    smallest = []
    for host_bytes in (0, total // 4, total):
        tiers = with_disk(host_for(profile, 0.5), 0.25, host_bytes)
        found = dict(plans(profile, tiers, 2))
        for smaller, larger in pairwise(found.values()):
            assert larger.predicted_step_s <= smaller.predicted_step_s + STEP_TOLERANCE * profile.step_s
        smallest.append(found)
    for poorer, richer in pairwise(smallest):
        assert richer.keys() == poorer.keys()  # peaks do not depend on the memories
        for budget, plan in richer.items():
            assert plan.predicted_step_s <= FACTOR * poorer[budget].predicted_step_s
            assert (
                plan.disk_bytes <= poorer[budget].disk_bytes or plan.predicted_step_s < poorer[budget].predicted_step_s
            )


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_does_not_depend_on_the_memories(seed: int) -> None:
    profile, tiers, _ = at_random(seed, 7)
    below, lots = with_disk(tiers, 0.1, None), random.Random(seed)
    actions = [lots.choice([KEEP, OFFLOAD] if s.recompute_s is None else list(Action)) for s in profile.storages]
    windows = {name: lots.choice([0, 8000, 40_000]) for name in ("in_flight_bytes", "prefetch_bytes")}
    drawn = [bytes(lots.randrange(2) for _ in actions) for _ in range(8)]
    timelines = [simulate(profile, actions, below, memories=memories, **windows) for memories in drawn]
    assert len({timeline.peak_bytes for timeline in timelines}) == 1
    assert len({timeline.reload_order for timeline in timelines}) == 1
