"""`hf-memopt evaluate`: the table, the files, and an environment."""

import json
from pathlib import Path

import pytest

from hf_memopt.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.mark.usefixtures("quick_evaluation")
def test_the_command_measures_and_rolls_out(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_memopt.recipes.reflow import smolvla_toy as toy

    flags = ["evaluate", "--policy", str(toy_student), "--output", str(tmp_path / "evaluation"), "--num-steps", "1,3"]
    data = ["--dataset-repo-id", toy.REPO_ID, "--dataset-root", str(toy_dataset), "--episodes", "3"]
    assert main([*flags, *data, "--env", "tiny_environment:Reach-v0", "--env-episodes", "2"]) == 0
    printed = capsys.readouterr().out
    assert "12 observations from 1 episode of `local/reach_past_obstacle`" in printed
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] in (["1"], ["3"])]
    assert [row[0] for row in rows] == ["1", "3"]
    assert [row[-2:] for row in rows] == [["100%", "3.000"]] * 2
    assert all(row[1] == row[2] for row in rows)  # untrained: still its teacher
    assert all(float(row[5]) > 0 for row in rows)
    found = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert found["student"]["error"]["1"] == found["teacher"]["error"]["1"] > 0
    assert (tmp_path / "evaluation" / "evaluation.png").exists()


def test_a_policy_without_a_teacher_needs_one_named(
    toy_teacher: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    flags = ["evaluate", "--policy", str(toy_teacher), "--output", str(tmp_path / "evaluation")]
    assert main(flags) == 2
    assert "pass --teacher" in capsys.readouterr().err
    assert not (tmp_path / "evaluation").exists()
