"""Tests of processes killed or stopped by the system while they save: `latest` stays valid."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import HANG_S

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=[(50, 10, 0), pytest.param((200, 60, 1), marks=pytest.mark.slow)], ids=str)
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Counts from kills at random moments, by kills, kills within a save and seed, and from files that cannot grow."""
    num_kills, num_wanted, _ = request.param
    script, folder = Path(__file__).parents[1] / "killed_saves.py", tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(script), str(folder), *map(str, request.param)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # forks of a process with more threads can hang
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S, env=environment)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["num_loaded"] >= num_kills
    assert result["num_in_the_middle"] >= num_wanted
    return result


@pytest.mark.e2e
def test_latest_loads_after_every_kill(killed: dict[str, Any]) -> None:
    assert killed["num_lost"] == 0  # of the saves that the process knew to be complete
    assert killed["state_is_that_of_an_uninterrupted_run"]


def test_latest_loads_after_every_write_beyond_the_limit(killed: dict[str, Any]) -> None:
    assert len(killed["errors"]) > 5
    assert all("step-000003.partial could not be written: " in error for error in killed["errors"])
    assert killed["state_after_errors_is_that_of_an_uninterrupted_run"]
