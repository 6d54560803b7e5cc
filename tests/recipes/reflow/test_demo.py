import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from late_imports import LateModule

from hf_memopt.report.runs import Outcome, outcome_line

demo = LateModule("hf_memopt.recipes.reflow.demo")
demo_measurements = LateModule("hf_memopt.recipes.reflow.demo_measurements")
toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_step_of_the_student_takes_a_side_as_the_teachers_ten_do(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hf_memopt.recipes.reflow.demo", "--output", str(tmp_path), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "✓ ON CPU (offloaded)" in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    line = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"teacher: \d+ % in 10 steps, \d+ ms; student: \d+ % in 1 step, \d+ ms", line)
    assert line == outcome_line({name: Outcome(**found) for name, found in results["outcomes"].items()})
    assert line in (tmp_path / "report" / "report.html").read_text()
    assert line in (tmp_path / "student_1step" / "README.md").read_text()
    teacher, student = results["evaluation"]["teacher"], results["evaluation"]["student"]
    assert student["error"]["1"] <= 0.5 * teacher["error"]["1"]
    assert student["normalized_straightness"] < 0.5 * teacher["normalized_straightness"]
    assert student["spread"]["1"] > 0.8 * teacher["spread"]["10"]  # the student has not collapsed to the mean
    passing = results["passing_rates"]
    assert passing == {name: results["evaluation"][name]["success_rate"] for name in ("teacher", "student")}
    assert passing["teacher"]["10"] >= 0.9
    assert passing["teacher"]["1"] < 0.5
    assert passing["student"]["1"] >= 0.75
    assert results["zigzag_rates"]["teacher"]["10"] < 0.1
    peaks = {
        design: max(sum(held.values()) for held in phases.values())
        for design, phases in results["memory_bytes"].items()
    }
    assert peaks["swap + shared prefix"] < peaks["teacher swapped in"] < peaks["teacher resident"]
    assert len(list((tmp_path / "figures").glob("*.png"))) == 4


def test_a_path_around_the_obstacle_passes_and_one_through_it_does_not() -> None:
    demonstration = next(toy.demonstrations(1, seed=0))
    around = torch.from_numpy(demonstration.positions[demo_measurements.DECISIVE_FRAME + 1 :])
    start, goal = (torch.from_numpy(point) for point in (demonstration.scene.start, demonstration.scene.goal))
    through = start + torch.linspace(0.5, 1, len(around))[:, None] * (goal - start)
    leap = goal.expand_as(around)  # no waypoint is near the obstacle, but the way to them leads through it
    paths = torch.stack([around, through, leap])
    assert demo_measurements.passes_obstacle(paths, demonstration).tolist() == [True, False, False]


def test_a_path_that_goes_to_both_sides_zigzags() -> None:
    demonstration = next(toy.demonstrations(1, seed=0))
    one_side = torch.from_numpy(demonstration.positions[demo_measurements.DECISIVE_FRAME + 1 :])
    start, goal = (torch.from_numpy(point) for point in (demonstration.scene.start, demonstration.scene.goal))
    straight = start + torch.linspace(0, 1, len(one_side))[:, None] * (goal - start)
    mirrored = torch.cat([one_side[:1], 2 * straight[1:2] - one_side[1:2], one_side[2:]])
    paths = torch.stack([one_side, straight, mirrored])
    assert demo_measurements.zigzags(paths, demonstration).tolist() == [False, False, True]


def test_learning_curve_reads_lerobots_log() -> None:
    log = (
        "INFO ot_train.py:641 step:30 smpl:480 ep:40 loss:2.206 grdn:7.368 lr:7.6e-05\n"
        "INFO ot_train.py:641 step:1K smpl:16K ep:1K loss:0.312 grdn:0.9 lr:1.0e-05\n"
    )
    assert demo_measurements.learning_curve(log, 30) == [(30, 2.206), (60, 0.312)]


def test_logs_and_pages_are_among_what_is_removed() -> None:
    assert {"logs", "evaluation", "report"} <= set(demo.OUTPUTS)


def test_the_exported_policy_gets_the_figures_that_were_measured(tmp_path: Path) -> None:
    words = [str(word) for word in demo.export_command(argparse.Namespace(output=tmp_path))]
    assert words[:2] == ["hf-memopt", "export"]
    assert words[words.index("--evaluation") + 1] == str(tmp_path / "evaluation")
    assert words[words.index("--num-steps") + 1] == "1"
