"""Tests of the demo at the smallest sizes. Skipped without the extra `metaworld`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_runs import environ_of_processes
from late_imports import LateModule

from hf_memopt.command_line import one_line_errors

demo = LateModule("benchmarks.metaworld.demo")


def test_the_teacher_trains_its_vlm_and_students_share_it(tmp_path: Path) -> None:
    options = demo.parse([f"--output={tmp_path}"])
    trained = ["--policy.train_expert_only=false", "--policy.freeze_vision_encoder=false"]
    frozen = ["--policy.train_expert_only=true", "--policy.freeze_vision_encoder=true"]
    teacher = demo.teacher_command(options)
    assert set(trained) <= set(teacher)
    assert f"--policy.optimizer_lr={demo.TEACHER_LEARNING_RATE}" in teacher
    for command in (demo.student_command(options, "student", "student_init"), demo.precompute_command(options)):
        assert set(frozen) <= set(command)


@pytest.mark.slow
def test_every_stage_runs(tmp_path: Path) -> None:
    pytest.importorskip("metaworld", reason="the extra 'metaworld' is not installed")
    command = [sys.executable, "-m", "benchmarks.metaworld.demo", "--output", str(tmp_path)]
    few = ("--demonstrations=1", "--teacher-steps=2", "--student-steps=2", "--episodes=2")
    done = subprocess.run([*command, *few], env=environ_of_processes(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["settings"]["episodes"] == 2
    policies = results["policies"]
    assert list(policies) == ["teacher_10", "teacher_4", "teacher_2", "teacher_1", "student_1", "second_1"]
    for found in policies.values():
        assert list(found["success"]) == [*demo.TASKS, "all"]
        assert found["success"]["all"]["episodes"] == 2 * len(demo.TASKS)
    assert results["mean_action"]["all"]["episodes"] == 2 * len(demo.TASKS)
    assert (tmp_path / "film_strip.png").is_file()
    assert policies["teacher_10"]["error"] == 0
    assert policies["teacher_1"]["error"] > 0
    with pytest.raises(subprocess.CalledProcessError):  # the folder is in use
        subprocess.run([*command, *few], env=environ_of_processes(), capture_output=True, check=True)


def test_without_the_extra_one_line_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert one_line_errors("demo_metaworld", demo.main, [f"--output={tmp_path}"]) == 2
    error = "metaworld is not installed: pip install 'hf_memopt[metaworld]'"
    assert capsys.readouterr().err.startswith(f"demo_metaworld: error: {error}")
    assert list(tmp_path.iterdir()) == []
