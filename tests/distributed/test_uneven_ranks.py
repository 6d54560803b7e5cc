"""Two processes on the CPU: each rank offloads by itself, however many passes the other makes."""

from pathlib import Path
from typing import Any

import pytest
from two_processes import results_of_both
from uneven_rank import BUDGET_GIB, CASES

FOLDER = Path(__file__).parent

Results = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each of the two ranks found."""
    return results_of_both(FOLDER / "uneven_rank.py", tmp_path_factory.mktemp("uneven"))


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
