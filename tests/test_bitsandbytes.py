"""Tests with bitsandbytes, in a process of their own: only there is it installed for PEFT and transformers to find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
APART = TESTS.parent / ".venv" / "apart"


@pytest.mark.e2e
@pytest.mark.skipif(not APART.exists(), reason="make setup puts bitsandbytes there")
@pytest.mark.slow
def test_its_tests_pass() -> None:
    paths = [str(APART), str(TESTS), os.environ["PYTHONPATH"]]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(TESTS / "apart")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        pytest.fail(f"{run.stdout}\n{run.stderr}", pytrace=False)
