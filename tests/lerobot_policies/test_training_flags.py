import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule

training_flags = LateModule("hf_memopt.lerobot.training_flags")
lerobot_runs = LateModule("lerobot_runs")

Read = Callable[..., Any]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """A function that reads flags on top of a complete run's."""
    complete = ["--policy.type=smolvla_reflow", "--policy.push_to_hub=false", "--policy.device=cpu"]
    complete += ["--dataset.repo_id=you/data", f"--output_dir={tmp_path / 'run'}", lerobot_runs.PLUGIN]

    def read(*flags: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["lerobot-train", *complete, *flags])
        return training_flags.read_training_flags()

    return read


def test_flags_are_read_and_validated(read: Read, tmp_path: Path) -> None:
    cfg = read("--steps=7", "--policy.teacher_num_steps=3")
    assert (cfg.steps, cfg.policy.teacher_num_steps, cfg.dataset.repo_id) == (7, 3, "you/data")
    assert cfg.output_dir == tmp_path / "run"
    assert cfg.optimizer is not None  # lerobot fills in the optimizer when it validates


def test_paths_become_absolute(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = read("--dataset.root=data", "--output_dir=outputs/run")
    assert cfg.dataset.root == str(tmp_path / "data")
    assert cfg.output_dir == tmp_path / "outputs" / "run"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--steps=many", "steps"),
        ("--policy.teacher_offload=nowhere", "teacher_offload='nowhere' is unknown; use one of"),
        ("--policy.reflow_real_data=2", "reflow_real_data=2"),
        ("--no_such_flag=1", "no_such_flag"),
    ],
)
def test_a_flag_that_is_refused_is_named(read: Read, flag: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(flag)


def test_what_only_validation_sees_is_refused_too(read: Read, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match=rf"^output_dir='{tmp_path}/run' exists; name a new folder, or .* --resume"):
        read()


def test_help_is_printed_and_ends_the_process(read: Read, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert not caught.value.code
    assert "--output_dir" in capsys.readouterr().out
