"""Tests that two ranks train on exactly after one of them was killed, again and again."""

from pathlib import Path

import pytest
from ranks import ends_of_ranks, on_ranks

SLOW = ((1, True), (20, False), (20, True))


@pytest.mark.parametrize(
    ("num_kills", "sharded"), [(1, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_killed_ranks_cost_nothing_but_time(tmp_path: Path, num_kills: int, sharded: bool) -> None:
    for attempt in range(num_kills):
        ends = ends_of_ranks("killed_rank:attempt_to_train", str(tmp_path), attempt, False, sharded)
        assert all(end.status for end in ends)
        assert (tmp_path / f"killed-{attempt}").exists()
    first, second = on_ranks("killed_rank:attempt_to_train", str(tmp_path), num_kills, True, sharded)
    assert first["resumed at"] == second["resumed at"] > 0
    assert first["differing"] == []
    # Registered objects and positions are the main process's; all other states are each rank's own.
    assert second["differing"] == ["average", "losses"]
