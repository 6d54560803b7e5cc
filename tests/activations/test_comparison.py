"""Passes that follow a plan are compared with plain ones."""

import random

from hf_memopt.activations.comparison import Comparison


def take_turns(slowdown: float, num_pairs: int, noise: float = 0.0) -> list[float]:
    """Return the slowdowns that pairs of passes show."""
    comparison, generator, shown = Comparison(takes_turns=True), random.Random(0), []
    for _ in range(num_pairs):
        assert not comparison.wants_plain
        assert comparison.add_planned((1 + slowdown) * (1 + noise * generator.expovariate(1.0))) is None
        assert comparison.wants_plain
        shown.append(comparison.add_plain(1 + noise * generator.expovariate(1.0)))
        if len(shown) == 8:
            break
    return [found for found in shown if found is not None]


def test_as_many_plain_as_planned_passes_are_compared_twice() -> None:
    first, second = take_turns(0.5, 8)
    assert abs(first - 0.5) < 1e-9
    assert abs(second - 0.5) < 1e-9


def test_more_passes_tell_more() -> None:
    _, second = take_turns(0.05, 8, noise=0.1)
    assert abs(second - 0.05) < 0.03


def test_nothing_is_asked_for_when_all_is_known_until_there_is_another_plan() -> None:
    comparison = Comparison(takes_turns=True)
    for _ in range(8):
        comparison.add_planned(1.0)
        comparison.add_plain(1.0)
    assert comparison.add_planned(9.0) is None
    assert not comparison.wants_plain
    comparison.restart()
    comparison.add_planned(1.0)
    assert comparison.wants_plain


def test_a_pair_of_unequal_passes_is_dropped() -> None:
    comparison = Comparison(takes_turns=True)
    comparison.add_planned(1.0)
    comparison.add_plain(1.0)
    comparison.add_planned(0.1)
    comparison.drop_planned()
    assert not comparison.wants_plain
    comparison.add_planned(3.0)
    assert comparison.add_plain(2.0) == 0.0


def test_two_planned_passes_are_compared_with_the_one_plain_pass() -> None:
    comparison = Comparison(takes_turns=False)
    comparison.plain_s = 1.0
    assert comparison.add_planned(1.5) is None
    assert not comparison.wants_plain
    assert comparison.add_planned(1.25) == 0.25
    assert comparison.add_planned(9.0) is None


def test_without_a_plain_pass_there_is_nothing_to_compare() -> None:
    comparison = Comparison(takes_turns=False)
    assert [comparison.add_planned(1.0) for _ in range(4)] == [None] * 4
