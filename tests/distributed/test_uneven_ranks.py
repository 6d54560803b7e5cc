"""Tests of two processes that offload independently, with any numbers of passes."""

from typing import Any

import pytest
from ranks import on_ranks
from uneven_rank import BUDGET_GIB, CASES

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    return on_ranks("uneven_rank:outcomes")


@pytest.mark.parametrize("case", CASES)
def test_both_end_with_the_weights_of_the_plain_run(results: Results, case: str) -> None:
    plain = results[0][case][0]["weights"]
    for rank in results:
        assert [run["weights"] == plain for run in rank[case]] == [True, True]
        assert rank[case][1]["moved"] > 0


@pytest.mark.parametrize("case", CASES)
def test_the_rank_with_a_budget_keeps_it(results: Results, case: str) -> None:
    found = results[0][case][1]
    assert found["has planned"]
    assert found["peak_gib"] <= BUDGET_GIB
