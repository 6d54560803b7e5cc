"""Tests that two processes of Trainer stop together when one of them has a non-finite gradient."""

from typing import Any

import pytest
from ranks import on_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks("non_finite_rank:outcomes", str(tmp_path_factory.mktemp("non_finite")))


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_all_ranks_stop_before_the_update(results: list[dict[str, Any]], engine: str) -> None:
    """Check that both ranks name the bad rank, and keep the parameters of the step before."""
    first, second = (rank[engine] for rank in results)
    assert first == second
    assert first["before"] == first["after"] != []
    assert first["message"].splitlines() == [
        "Non-finite gradient at step 3. That update was not made.",
        "  rank 1, micro-batch 2: first.bias, first.weight",
    ]
