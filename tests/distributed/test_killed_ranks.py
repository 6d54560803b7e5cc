"""Tests that two ranks train on exactly after one of them was killed, again and again."""

from pathlib import Path

import pytest
from ranks import ends_of_ranks, on_ranks


def train(folder: Path, num_kills: int, sharded: bool) -> None:
    for attempt in range(num_kills):
        ends = ends_of_ranks("killed_rank:attempt_to_train", str(folder), attempt, False, sharded)
        assert all(end.status for end in ends)
        assert (folder / f"killed-{attempt}").exists()
    first, second = on_ranks("killed_rank:attempt_to_train", str(folder), num_kills, True, sharded)
    assert first["resumed at"] == second["resumed at"] > 0
    assert first["differing"] == []
    # Registered objects and positions are the main process's; all other states are each rank's own.
    assert second["differing"] == ["average", "losses"]


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_rank_costs_nothing_but_time(tmp_path: Path, sharded: bool) -> None:
    train(tmp_path, 1, sharded)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_twenty_killed_ranks(tmp_path: Path, sharded: bool) -> None:
    train(tmp_path, 20, sharded)
