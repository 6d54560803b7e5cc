"""Two processes on the CPU, by Trainer, stop together when one of them has a gradient that is not finite."""

from pathlib import Path
from typing import Any

import pytest
from two_processes import results_of_both

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What happened on each of the two ranks."""
    folder = tmp_path_factory.mktemp("non_finite")
    return results_of_both(FOLDER / "non_finite_rank.py", folder)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_all_ranks_stop_before_the_update(results: tuple[dict[str, Any], ...], engine: str) -> None:
    """No rank hangs, both name the one at fault, and their parameters are those of the step before."""
    first, second = (rank[engine] for rank in results)
    assert first == second
    assert first["before"] == first["after"] != []
    assert first["message"].splitlines() == [
        "Non-finite gradient at step 3. It was not applied: the parameters are those of step 2.",
        "  rank 1, micro-batch 2: first.bias, first.weight",
    ]
