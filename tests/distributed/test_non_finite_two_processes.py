"""Two processes on the CPU stop together when one of them has a gradient that is not finite."""

import json
from pathlib import Path

from two_processes import torchrun

FOLDER = Path(__file__).parent


def test_all_ranks_stop_before_the_update(tmp_path: Path) -> None:
    """No rank hangs, both name the one at fault, and their parameters are those of the step before."""
    torchrun(FOLDER / "non_finite_rank.py", str(tmp_path))
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["before"] == first["after"] != []
    assert first["message"].splitlines() == [
        "Non-finite gradient at step 3. It was not applied: the parameters are those of step 2.",
        "  rank 1, micro-batch 2: first.bias, first.weight",
    ]
