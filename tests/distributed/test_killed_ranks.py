"""One of two ranks is killed again and again; started anew, both train on as if nothing had been."""

import json
from pathlib import Path

import pytest
from two_processes import torchrun

SCRIPT = Path(__file__).parent / "killed_rank.py"


def train(folder: Path, num_kills: int, sharded: bool) -> None:
    for attempt in range(num_kills):
        torchrun(SCRIPT, str(folder), str(attempt), "0", str(int(sharded)), is_to_succeed=False)
        assert (folder / f"killed-{attempt}").exists()
    torchrun(SCRIPT, str(folder), str(num_kills), "1", str(int(sharded)))
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["resumed at"] == second["resumed at"] > 0
    assert first["differing"] == []
    # Registered objects and positions are the main process's; everything else is each rank's own.
    assert second["differing"] == ["average", "losses"]


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_rank_costs_nothing_but_time(tmp_path: Path, sharded: bool) -> None:
    train(tmp_path, 1, sharded)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_twenty_killed_ranks(tmp_path: Path, sharded: bool) -> None:
    train(tmp_path, 20, sharded)
