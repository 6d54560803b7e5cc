"""All processes of a machine keep one copy of the teacher in host memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import HANG_S
from two_processes import TESTS, torchrun

SCRIPT = Path(__file__).parent / "teacher_rank.py"


def check(folder: Path, num_ranks: int) -> None:
    seen: list[dict[str, Any]] = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
    for mode in ("swap", "stream"):
        assert all(one[mode]["equal"] for one in seen)
        private_bytes = num_ranks * seen[0][mode]["weights_bytes"]
        assert private_bytes == num_ranks * 32 * 2**20
        # Before, each process had a copy of its own.
        kept_bytes = private_bytes - sum(one[mode]["freed_bytes"] for one in seen)
        assert kept_bytes <= (1 / num_ranks + 0.05) * private_bytes
        assert all(one[mode]["files"] for one in seen)
    for one in seen:
        assert "differ between rank 0 and ranks [1]" in one["refusal"]
        assert one["named"] == []


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory without a name, which Linux has")
def test_two_processes_hold_one_copy(tmp_path: Path) -> None:
    torchrun(SCRIPT, str(tmp_path))
    check(tmp_path, num_ranks=2)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory without a name, which Linux has")
def test_four_processes_hold_at_most_three_tenths_of_four_copies(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", str(SCRIPT)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    subprocess.run([*launch, str(tmp_path)], env=environment, timeout=HANG_S, check=True)
    check(tmp_path, num_ranks=4)
