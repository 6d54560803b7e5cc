"""Tests of simulated plans: the windows tried, and the fastest plan for each peak."""

import math

import pytest
from planner_profiles import chain, host

from hf_memopt.activations.planner.candidates import Candidate, CopyWindow, ParetoFront, Trials, window_bytes, windows
from hf_memopt.activations.planner.profile import Action
from hf_memopt.activations.planner.simulator import Timeline


def test_windows_reach_as_far_as_was_allowed() -> None:
    assert windows(0)[0] == CopyWindow(0.0, 0)
    assert {window.prefetch_storages for window in windows(0)} == {0}
    assert [window.prefetch_storages for window in windows(3)[:4]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("window", "offloaded", "num_bytes"),
    [
        (CopyWindow(1 / 2, 2), [], (0, 0)),
        (CopyWindow(1 / 2, 2), [10, 20, 30], (30, 60)),
        (CopyWindow(1 / 2, 1), [10, 20, 30], (30, 30)),
        (CopyWindow(1 / 64, 8), [10, 20, 30], (0, 60)),  # a window below the smallest storage is zero
    ],
)
def test_a_window_in_bytes(window: CopyWindow, offloaded: list[int], num_bytes: tuple[int, int]) -> None:
    assert window_bytes(window, offloaded) == num_bytes


def costing(peak_bytes: int, step_s: float) -> Candidate:
    return Candidate(b"", b"", CopyWindow(0, 0), 0, 0, Timeline(peak_bytes, step_s, 0, 0, (), 0), None)


def test_the_front_keeps_what_is_fastest_for_what_it_holds() -> None:
    front = ParetoFront()
    small, middle, large = costing(100, 3.0), costing(200, 2.0), costing(300, 1.0)
    for each in (large, small, middle, costing(250, 2.5), costing(150, 2.999)):
        front.add(each)
    assert front.members == [small, middle, large]
    assert [front.step_within(peak) for peak in (99, 100, 299, 300)] == [math.inf, 3.0, 2.0, 1.0]
    assert front.neighbours(middle) == [small, large]
    better = costing(150, 0.5)
    front.add(better)
    assert front.members == [small, better]


def test_a_plan_is_simulated_once_and_only_so_many_are() -> None:
    profile, window = chain([10, 20, 30]), CopyWindow(0.0, 0)
    trials = Trials(profile, host(100.0, 100.0, budget_bytes=30), 0, num_left=2)
    keep, offload = int(Action.KEEP), int(Action.OFFLOAD)
    first = trials.evaluate(bytes([offload, keep, keep]), window)
    assert trials.evaluate(bytes([offload, keep, keep]), window) is first
    assert trials.num_left == 1
    assert trials.evaluate(bytes([offload, keep, offload]), window) is None  # 40 bytes for the host
    assert trials.evaluate(bytes([keep, keep, keep]), window).peak_bytes == 60
    assert trials.evaluate(bytes([keep, offload, keep]), window) is None  # no simulation left
