"""Tests of the comparison of planned passes with plain passes."""

import random

import pytest

from hf_memopt.activations.pass_times import Comparison

NUM_PAIRS = 8


def in_turn(slowdown: float, max_slowdown: float = 0.0, noise: float = 0.0, seed: int = 0) -> dict[int, float]:
    """Return the slowdowns found too large, by the number of pairs of passes."""
    comparison, generator = Comparison(max_slowdown, takes_turns=True), random.Random(seed)
    found: dict[int, float] = {}
    for number in range(1, NUM_PAIRS + 1):
        assert not comparison.wants_plain
        assert comparison.add_planned((1 + slowdown) * (1 + noise * generator.expovariate(1.0))) is None
        assert comparison.wants_plain
        excessive = comparison.add_plain(1 + noise * generator.expovariate(1.0))
        if excessive is not None:
            found[number] = excessive
    return found


@pytest.mark.parametrize(("slowdown", "numbers"), [(0.5, [1, 2, 8]), (0.08, [2, 8]), (0.01, [8]), (0.0, [])])
def test_the_more_passes_the_less_a_plan_may_miss_its_limit(slowdown: float, numbers: list[int]) -> None:
    found = in_turn(slowdown)
    assert list(found) == numbers
    assert list(in_turn(slowdown + 0.2, max_slowdown=0.2)) == numbers
    assert list(found.values()) == pytest.approx([slowdown] * len(numbers))


def test_the_fastest_of_many_passes_tell_what_single_ones_do_not() -> None:
    errors = [abs(in_turn(0.2, noise=0.1, seed=seed)[NUM_PAIRS] - 0.2) for seed in range(100)]
    assert sum(error < 0.04 for error in errors) > 90


def test_nothing_is_asked_for_when_all_is_known_until_there_is_another_plan() -> None:
    comparison = Comparison(0.03, takes_turns=True)
    for _ in range(NUM_PAIRS):
        comparison.add_planned(1.0)
        comparison.add_plain(1.0)
    assert comparison.add_planned(9.0) is None
    assert not comparison.wants_plain
    comparison.restart()
    comparison.add_planned(1.0)
    assert comparison.wants_plain


def test_a_pair_of_unequal_passes_is_dropped() -> None:
    comparison = Comparison(0.03, takes_turns=True)
    comparison.add_planned(0.1)
    comparison.drop_planned()
    assert not comparison.wants_plain
    comparison.add_planned(3.0)
    assert comparison.add_plain(2.0) == 0.5


def test_two_planned_passes_are_compared_with_the_one_plain_pass() -> None:
    comparison = Comparison(0.03, takes_turns=False)
    comparison.plain_s = 1.0
    assert comparison.add_planned(1.5) is None
    assert not comparison.wants_plain
    assert comparison.add_planned(1.25) == 0.25
    assert comparison.add_planned(9.0) is None


def test_without_a_plain_pass_there_is_nothing_to_compare() -> None:
    comparison = Comparison(0.03, takes_turns=False)
    assert [comparison.add_planned(1.0) for _ in range(4)] == [None] * 4
