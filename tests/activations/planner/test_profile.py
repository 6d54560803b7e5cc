"""Tests of a step's record of saves and uses: orders, counts, and impossible records."""

import math

import pytest

from hf_memopt.activations.planner.profile import EventKind, Profile, SavedStorage

CHAIN = (
    SavedStorage(10, 0.0, (9.0,)),
    SavedStorage(20, 1.0, (4.0, 8.0), recompute_s=0.5, sources=(0,)),
    SavedStorage(40, 2.0, (), recompute_s=0.5, sources=(1,)),
)


def test_a_source_is_needed_as_early_as_what_is_computed_from_it() -> None:
    profile = Profile(CHAIN, 10.0)
    assert profile.first_needs_s == [4.0, 4.0, math.inf]
    assert profile.dependents_first == [2, 1, 0]
    assert profile.use_order == [1, 0]


def test_uses_are_counted_for_each_backward() -> None:
    profile = Profile(CHAIN, 10.0, backward_ends_s=(5.0,))
    assert profile.num_uses_by_backward == [[0, 1, 0], [1, 1, 0]]


def test_events_at_one_time_come_in_the_order_of_their_kinds() -> None:
    profile = Profile((SavedStorage(10, 1.0, (1.0,), freed_s=1.0),), 2.0, backward_ends_s=(1.0,))
    assert [kind for _, kind, _ in profile.events] == list(EventKind)


@pytest.mark.parametrize(
    ("storages", "complaint"),
    [
        ((SavedStorage(1, 3.0, (2.0,)),), r"saved_at_s=3\.0 is after its first need at 2\.0"),
        ((SavedStorage(1, 1.0, (2.0,), 0.1, (1,)),), "names a storage that does not exist"),
        ((SavedStorage(1, 1.0, (2.0,), 0.1, (1,)), SavedStorage(1, 1.0, (2.0,), 0.1, (0,))), "cycle"),
    ],
)
def test_records_that_cannot_be_are_refused(storages: tuple[SavedStorage, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Profile(storages, 4.0)
