import pytest

from hf_memopt.planning.workload import Lever, divisors, num_steps


@pytest.mark.parametrize("number", [1, 2, 12, 16, 97])
def test_divisors_are_complete_and_ascending(number: int) -> None:
    assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]


@pytest.mark.parametrize(("offload", "num_micro_batches", "expected"), [("auto", 1, 5), ("auto", 2, 3), ("all", 1, 2)])
def test_five_passes_settle_a_plan_and_two_steps_show_an_optimizer(
    offload: str, num_micro_batches: int, expected: int
) -> None:
    assert num_steps(offload, num_micro_batches) == expected


@pytest.mark.parametrize(("num_micro_batches", "expected"), [(1, 3), (2, 2)])
def test_three_passes_settle_streamed_weights(num_micro_batches: int, expected: int) -> None:
    assert num_steps("off", num_micro_batches, "host") == expected
    assert num_steps("auto", num_micro_batches, "host") == num_steps("auto", num_micro_batches)


def test_a_lever_may_have_values_that_need_a_disk() -> None:
    lever = Lever("base", ("resident", "host", "file"), of_disk=("file",))
    assert lever.without_disk().values == ("resident", "host")
