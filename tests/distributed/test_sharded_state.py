"""Tests of FSDP2's sharded checkpoints: saved and resumed by two processes, refused by four and by one."""

import json
from pathlib import Path

from ranks import on_ranks


def test_a_sharded_run_is_resumed_exactly_or_not_at_all(tmp_path: Path) -> None:
    """Check also that any number of processes can read the weights alone."""
    first, second = on_ranks("sharded_state_rank:resumed", str(tmp_path))
    assert first["at"] == second["at"] == 3
    assert first["differing"] == []
    # Registered objects and positions are the main process's; all other states are each rank's own.
    assert second["differing"] == ["average", "losses"]
    manifest = json.loads((tmp_path / "run" / "step-000006" / "manifest.json").read_text())
    shards = {f"{folder}/__{rank}_0.distcp" for folder in ("pytorch_model_fsdp_0", "optimizer_0") for rank in (0, 1)}
    assert shards | {"pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"} <= manifest["files"].keys()

    for num_processes in (4, 1):
        for found in on_ranks("sharded_state_rank:elsewhere", str(tmp_path), num_ranks=num_processes):
            assert f"was saved with num_processes=2, and this run has {num_processes}" in found["message"]
            assert found["weights"] == first["weights"]
