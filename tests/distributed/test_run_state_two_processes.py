"""Tests that two processes save and resume together, fail together, and stop at a signal to one of them."""

import json
import re
from pathlib import Path

from ranks import on_ranks


def test_two_ranks_save_resume_fail_and_stop_together(tmp_path: Path) -> None:
    first, second = on_ranks("run_state_rank:outcomes", str(tmp_path))
    assert first["resumed"]["differing"] == []
    # Registered objects and positions are the main process's; all other states are each rank's own.
    assert second["resumed"]["differing"] == ["average", "losses"]
    assert first["resumed"]["random"] != second["resumed"]["random"]
    manifest = json.loads((tmp_path / "run" / "step-000006" / "manifest.json").read_text())
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= manifest["files"].keys()

    failure = (
        r"OSError: \[Errno 28\] .*step-000007\.partial could not be written: \[Errno 28\] No space left on device; its"
    )
    full = [each["full_disk_on_one_rank"] for each in (first, second)]
    assert re.match(f"RuntimeError: a checkpoint failed on another rank: rank 1: {failure}", full[0]["message"])
    assert re.match(failure, full[1]["message"])
    assert [each["step"] for each in full] == [6, 6]

    assert "ValueError: checkpoint" in first["damaged"]["message"]
    assert "optimizer.bin differs from what was saved" in first["damaged"]["message"]
    assert second["damaged"]["message"].startswith("RuntimeError: a checkpoint failed on another rank: rank 0: Value")

    assert first["signal_on_one_rank"] == second["signal_on_one_rank"] == {"status": 143, "step": 8}
    assert (tmp_path / "run" / "latest").read_text().startswith("step-000008\n")
