"""One process decides by itself; what two decide together is in test_offload_two_processes.py."""

import pytest

from hf_memopt.activations.planner.offload_plan import InfeasibleBudgetError
from hf_memopt.activations.rank_agreement import raise_on_all_ranks


@pytest.mark.parametrize("is_decided", [False, True])
def test_without_an_error_the_plan_counts(is_decided: bool) -> None:
    assert raise_on_all_ranks(None, 100, is_decided) is is_decided


def test_an_error_is_raised_as_it_is() -> None:
    error = InfeasibleBudgetError(100, 200)
    with pytest.raises(InfeasibleBudgetError) as raised:
        raise_on_all_ranks(error, 100, is_decided=False)
    assert raised.value is error
