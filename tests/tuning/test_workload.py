"""What workloads share: the divisors of a batch, and how many steps an offloader needs for its plan."""

import pytest

from hf_memopt.tuning.workload import divisors, num_steps_of_auto


@pytest.mark.parametrize("number", [1, 2, 12, 16, 97])
def test_divisors_are_complete_and_ascending(number: int) -> None:
    assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]


@pytest.mark.parametrize(("num_micro_batches", "num_steps"), [(1, 4), (2, 2), (8, 2)])
def test_four_passes_settle_a_plan_and_two_steps_show_an_optimizer(num_micro_batches: int, num_steps: int) -> None:
    assert num_steps_of_auto(num_micro_batches) == num_steps
