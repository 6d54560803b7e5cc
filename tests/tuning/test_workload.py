"""What workloads share: the divisors of a batch."""

import pytest

from hf_memopt.tuning.workload import divisors


@pytest.mark.parametrize("number", [1, 2, 12, 16, 97])
def test_divisors_are_complete_and_ascending(number: int) -> None:
    assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]
