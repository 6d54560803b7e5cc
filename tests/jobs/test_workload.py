import pytest

from hf_memopt.jobs.workload import divisors, num_steps


@pytest.mark.parametrize("number", [1, 2, 12, 16, 97])
def test_divisors_are_complete_and_ascending(number: int) -> None:
    assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]


@pytest.mark.parametrize(("offload", "num_micro_batches", "expected"), [("auto", 1, 5), ("auto", 2, 3), ("all", 1, 2)])
def test_five_passes_settle_a_plan_and_two_steps_show_an_optimizer(
    offload: str, num_micro_batches: int, expected: int
) -> None:
    assert num_steps(offload, num_micro_batches) == expected
