"""Tests of Lightning's Trainer under DDP in two processes: the plain run's weights, and the ranks' largest memory."""

from typing import Any

import pytest
from ranks import on_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both ranks."""
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


def test_logged_memory_is_the_largest_of_the_ranks(results: list[dict[str, Any]]) -> None:
    """Check the first rank's log after the second rank has taken a quarter of a GiB more."""
    assert results[0]["more on the second"] == results[1]["more on the second"]
    before, after = (results[0][how] for how in ("manual optimization", "more on the second"))
    assert all(after[name] > before["auto"]["memory"][name] + 0.2 for name in after if name.endswith("rss_gib"))
    assert {"memory/forward_host_rss_gib", "memory/backward_host_rss_gib"} < after.keys()
