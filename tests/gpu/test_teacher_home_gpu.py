"""Tests that the recipe decides `teacher_offload=auto` for the current card before its first step."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmark_runs import environ_of_processes
from patience import HANG_S

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Runs in a process of its own: a simulation forks, which is forbidden after a backward on a device.
RECIPE = """
import sys
from fake_cuda import device
if device.is_loaded():
    device.install_operators()
from hf_memopt.recipes.reflow_smolvla import main
main(sys.argv[1:])
"""


def test_auto_is_decided_by_the_memory_that_is_free(toy_student: Path, toy_dataset: Path, tmp_path: Path) -> None:
    from lerobot_runs import logged, train_flags

    environ = environ_of_processes()
    environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environ["PYTHONPATH"]])
    flags = train_flags(toy_student, toy_dataset, tmp_path / "run", steps=2, device="cuda")
    command = [sys.executable, "-c", RECIPE, *flags, "--gradient_accumulation_steps=2"]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line for line in run.stderr.splitlines() if "teacher_offload=auto" in line]
    assert len(lines) == 1, run.stderr
    said = re.search(
        r"teacher_offload=auto: resident, by simulation of a batch of 2: predicted peak 0\.\d\d GiB, needs "
        rf"0\.\d\d GiB of the (\d+\.\d\d) GiB that {torch.cuda.get_device_name(0)} can give$",
        lines[0],
    )
    assert said, lines[0]
    assert 0 < float(said[1]) < torch.cuda.get_device_properties(0).total_memory / 2**30
    assert "teacher: resident; resident was asked for" in run.stderr
    config = tmp_path / "run" / "checkpoints" / "last" / "pretrained_model" / "config.json"
    assert json.loads(config.read_text())["teacher_offload"] == "resident"
    peaks = logged(run.stderr, "memory/backward_peak_gib")
    own, on_device = (logged(run.stderr, f"memory/teacher_{what}_gib") for what in ("own", "device"))
    assert len(peaks) == 1
    assert 0 < own[0] == on_device[0] < peaks[0] < 1
