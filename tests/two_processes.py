"""Runs a script in two or more processes that talk to each other on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from patience import HANG_S

TESTS = Path(__file__).parent


def torchrun(script: Path, *arguments: str, is_to_succeed: bool = True, num_processes: int = 2) -> str:
    """What all processes wrote to standard error; all have to succeed, or not. Helpers beside the tests can be
    imported.

    They have as many threads as this process, since results are compared bit by bit.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [*launch, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths},
    )
    assert (result.returncode == 0) == is_to_succeed, result.stderr[-6000:]
    return result.stderr


def results_of_both(script: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What two processes wrote to `rank<number>.json` in the folder, their argument."""
    torchrun(script, str(folder))
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1))
    return first, second


def deepspeed_results(script: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same with DeepSpeed on the CPU."""
    with patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):
        return results_of_both(script, folder)
