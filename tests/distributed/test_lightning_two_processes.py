"""Tests that Lightning's Trainer under DDP in two processes gives the plain run's weights."""

from typing import Any

import pytest
from ranks import on_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks("lightning_rank:outcomes", str(tmp_path_factory.mktemp("lightning")))


@pytest.mark.parametrize("mode", ["all", "auto"])
@pytest.mark.parametrize("how", ["plain", "accumulation and clipping", "manual optimization"])
def test_weights_are_those_of_the_plain_run(results: list[dict[str, Any]], how: str, mode: str) -> None:
    first, second = (rank[how] for rank in results)
    for rank in (first, second):
        assert rank[mode]["weights"] == rank["plain"]["weights"]
        assert rank[mode]["losses"] == rank["plain"]["losses"]
        assert rank[mode]["moved"] > 0
        assert not rank[mode]["replaced"]
    assert first[mode]["weights"] == second[mode]["weights"]
    assert first[mode]["losses"] != second[mode]["losses"]  # losses of each rank's own samples
