"""Tests that the simulated timeline of a step under a plan equals closed forms."""

import pytest
from planner_profiles import host

from hf_memopt.activations.planner.profile import Action, Profile, SavedStorage, count_needs
from hf_memopt.activations.planner.simulator import Timeline, simulate

KEEP, OFFLOAD, RECOMPUTE = Action
HOST = host(write_bytes_per_s=100.0, read_bytes_per_s=50.0)


def run(
    storages: list[SavedStorage], actions: list[Action], step_s: float = 10.0, in_flight: int = 0, prefetch: int = 0
) -> Timeline:
    return simulate(Profile(tuple(storages), step_s), actions, HOST, in_flight_bytes=in_flight, prefetch_bytes=prefetch)


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
    """Check a copy that ends exactly when the second save needs its memory, with time enough for the reload."""
    storages = [SavedStorage(100, 1.0, (9.0,)), SavedStorage(10, 2.0, (7.0,))]
    result = run(storages, [OFFLOAD, OFFLOAD], in_flight=100, prefetch=100)
    assert result.stall_s == 0
    assert result.peak_bytes == 110
    assert result.reload_order == (1, 0)


def test_copy_that_is_late_for_forward_stalls_by_the_difference() -> None:
    storages = [SavedStorage(100, 1.0, (9.0,)), SavedStorage(10, 1.75, (7.0,))]
    assert run(storages, [OFFLOAD, OFFLOAD], in_flight=100, prefetch=100).stall_s == 0.25


def test_two_storages_share_the_queue_to_the_host() -> None:
    """Check copies of saves at 1, ending at 2 and 3. A third save at 1.5 waits 1.5 s for both. A reload takes 2 s."""
    storages = [SavedStorage(100, 1.0, (9.0,)), SavedStorage(100, 1.0, (8.0,)), SavedStorage(1, 1.5, (7.0,))]
    result = run(storages, [OFFLOAD, OFFLOAD, KEEP], in_flight=200)
    assert result.stall_s == 0  # no save needs their memory
    assert result.peak_bytes == 201
    result = run([*storages[:2], SavedStorage(200, 1.5, (7.0,))], [OFFLOAD] * 3, in_flight=200)
    assert result.stall_s == 1.5 + 2 + 2


def test_two_reloads_share_the_queue_to_the_device() -> None:
    """Check that the use of storage 2 at 6 starts its own reload and the other two."""
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
    """Check a chain of storages 0, 1 and 2: the use of 2 also recomputes 1, which then stays for its own use."""
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
    assert result.stall_s == pytest.approx((100 + 10) / 100 + (100 + 10) / 50)  # since sums of tenths round
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
    """Check that storage 1 reloads in 2 s while 1 s of compute and 1 s of recomputing storage 0 pass."""
    storages = [SavedStorage(1, 1.0, (8.0,), 1.0), SavedStorage(100, 1.0, (8.0,)), SavedStorage(50, 2.0, (7.0,))]
    result = run(storages, [RECOMPUTE, OFFLOAD, OFFLOAD], prefetch=100)
    assert result.stall_s == (100 + 50) / 100 + 1


def test_needs_of_one_node_are_held_together() -> None:
    together = [SavedStorage(100, 1.0, (8.0,), 0.5), SavedStorage(50, 2.0, (8.0,), 0.5)]
    apart = [SavedStorage(100, 1.0, (8.0,), 0.5), SavedStorage(50, 2.0, (7.0,), 0.5)]
    assert run(together, [RECOMPUTE] * 2).peak_bytes == 150
    assert run(apart, [RECOMPUTE] * 2).peak_bytes == 100


def test_a_source_is_needed_by_each_storage_that_is_computed_from_it() -> None:
    storages = (SavedStorage(10, 1.0, (9.0,)), SavedStorage(20, 2.0, (7.0, 8.0), 0.25, (0,)))
    profile = Profile(storages, 10.0)
    assert count_needs(profile, [KEEP, KEEP]) == [1, 2]
    assert count_needs(profile, [KEEP, RECOMPUTE]) == [2, 2]


def test_wrong_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="recompute_s=None"):
        run([SavedStorage(1, 1.0, (2.0,))], [RECOMPUTE])
    with pytest.raises(ValueError, match="2 entries for 1 storages"):
        run([SavedStorage(1, 1.0, (2.0,))], [KEEP, KEEP])
