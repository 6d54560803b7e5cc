"""Lightning's Trainer under DDP in two processes on the CPU: the plain run's weights."""

from pathlib import Path
from typing import Any

import pytest
from two_processes import results_of_both

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What came of it on each of the two ranks."""
    folder = tmp_path_factory.mktemp("lightning")
    return results_of_both(FOLDER / "lightning_rank.py", folder)


@pytest.mark.parametrize("mode", ["all", "auto"])
@pytest.mark.parametrize("how", ["plain", "accumulation and clipping", "manual optimization"])
def test_weights_are_those_of_the_plain_run(results: tuple[dict[str, Any], ...], how: str, mode: str) -> None:
    first, second = (rank[how] for rank in results)
    for rank in (first, second):
        assert rank[mode]["weights"] == rank["plain"]["weights"]
        assert rank[mode]["losses"] == rank["plain"]["losses"]
        assert rank[mode]["moved"] > 0
        assert not rank[mode]["replaced"]
    assert first[mode]["weights"] == second[mode]["weights"]
    assert first[mode]["losses"] != second[mode]["losses"]  # of their own samples
