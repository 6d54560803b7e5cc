"""The hf-memopt command: what it prints, writes and refuses."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from hf_memopt import __version__
from hf_memopt.cli import main

Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, *arguments: str) -> str:
    """Standard error of a command that must end with exit status 2."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"hf-memopt {arguments[0]}: error: ")
    return captured.err


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"hf_memopt {__version__}\n"


COMMANDS = ("prepare-student", "precompute", "evaluate", "export", "doctor", "report", "estimate", "plan", "completion")


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: hf-memopt {command}" in capsys.readouterr().out


def test_every_command_is_listed_once(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if re.match(r" {4}\w", line)]
    assert sorted(listed) == sorted(COMMANDS)


def test_without_a_command_it_says_what_it_does(capsys: Capture) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    told = [line for line in printed.splitlines() if re.match(r" {2}\w", line)]
    assert len(told) == 6
    assert {command for line in told for command in re.findall(r"hf-memopt ([\w-]+)", line)} < set(COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(shell: str, capsys: Capture) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)
    assert "--seq-len" in script


def test_bash_completes_a_command(tmp_path: Path, capsys: Capture) -> None:
    if (bash := shutil.which("bash")) is None:
        pytest.skip("needs bash")
    main(["completion", "bash"])
    script = tmp_path / "completion.sh"
    script.write_text(capsys.readouterr().out)
    ask = f"source {script}; COMP_WORDS=(hf-memopt est); COMP_CWORD=1; "
    ask += "$(complete -p hf-memopt | grep -oP '(?<=-F )\\S+'); "
    found = subprocess.run([bash, "-c", ask + 'echo "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["estimate"]


def test_prepared_student_trains_with_the_printed_command(
    toy_teacher: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    from lerobot_runs import PLUGIN, lerobot_train, run, train_flags, weights

    student = tmp_path / "student"
    assert main(["prepare-student", "--teacher", str(toy_teacher), "--output", str(student)]) == 0
    printed = capsys.readouterr().out
    assert f"lerobot-train {PLUGIN} --policy.path={student} --dataset.repo_id=<repo>" in printed
    assert f"accelerate launch -m hf_memopt.recipes.reflow_smolvla --policy.path={student}" in printed
    run(lerobot_train, PLUGIN, *train_flags(student, toy_dataset, tmp_path / "run", steps=1))
    assert weights(tmp_path / "run").keys() == weights(toy_teacher).keys()


def test_prepare_student_reports_errors(tmp_path: Path, capsys: Capture) -> None:
    message = refused(capsys, "prepare-student", "--teacher", "/nowhere", "--output", str(tmp_path / "student"))
    assert "'/nowhere' is neither a checkpoint folder nor a hub id" in message
    assert list(tmp_path.iterdir()) == []


def test_export_without_evaluation(toy_student: Path, tmp_path: Path, capsys: Capture) -> None:
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
    from lerobot_runs import weights

    output = tmp_path / "exported"
    flags = ["--policy", str(toy_student), "--output", str(output), "--num-steps", "2", "--no-evaluation"]
    assert main(["export", *flags]) == 0
    assert f"exported to {output}" in capsys.readouterr().out
    policy = SmolVLAPolicy.from_pretrained(output, strict=True)
    assert policy.config.num_steps == 2
    exported, student = weights(output), weights(toy_student)
    assert all(torch.equal(exported[name], student[name]) for name in student)
    assert "Not measured" in (output / "README.md").read_text()


@pytest.mark.usefixtures("quick_evaluation")
def test_export_measures_on_the_runs_held_out_episodes(
    toy_student: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    from lerobot_runs import PLUGIN, lerobot_train, run, train_flags

    flags = train_flags(toy_student, toy_dataset, tmp_path / "run", steps=1)
    run(lerobot_train, PLUGIN, *flags, "--dataset.eval_split=0.25")
    output = tmp_path / "exported"
    assert main(["export", "--policy", str(tmp_path / "run"), "--output", str(output)]) == 0
    card = (output / "README.md").read_text()
    assert "12 observations from 1 episode of `local/reach_past_obstacle`, held out from training" in card
    rows = [line.split("|")[1:4] for line in card.splitlines() if line.startswith("| 1 |")]
    assert len(rows) == 1
    teacher, student = (float(cell) for cell in rows[0][1:])
    assert teacher > 0
    assert student > 0


def test_export_refuses_an_existing_folder(toy_student: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("precious")
    flags = ["--policy", str(toy_student), "--output", str(tmp_path), "--no-evaluation"]
    assert "exists; name a new folder or remove this one" in refused(capsys, "export", *flags)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_export_refuses_zero_steps(toy_student: Path, tmp_path: Path, capsys: Capture) -> None:
    flags = ["--policy", str(toy_student), "--output", str(tmp_path / "exported"), "--num-steps", "0"]
    assert "argument --num-steps: 0 must be at least 1" in refused(capsys, "export", *flags, "--no-evaluation")
    assert list(tmp_path.iterdir()) == []


def moved(student: Path, copy: Path, **changes: object) -> list[str]:
    """Flags of a command for a copy of a student with other entries in its configuration."""
    shutil.copytree(student, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return ["--policy", str(copy), "--output", str(copy.parent / "output")]


@pytest.mark.parametrize("name", ["gone/to/nowhere", "/gone", "nobody/no-such-vlm"])
def test_a_vlm_that_is_gone_is_named(name: str, toy_student: Path, tmp_path: Path, capsys: Capture) -> None:
    flags = moved(toy_student, tmp_path / "student", vlm_model_name=name)
    message = refused(capsys, "export", *flags, "--no-evaluation")
    assert f"vlm_model_name={name!r}" in message
    assert "write its folder or hub id into config.json, and as tokenizer_name into policy_preprocessor.json" in message


def test_data_that_are_gone_are_named(toy_student: Path, tmp_path: Path, capsys: Capture) -> None:
    flags = moved(toy_student, tmp_path / "student")
    data = ["--dataset-repo-id", "local/gone", "--dataset-root", str(tmp_path / "gone")]
    message = refused(capsys, "evaluate", *flags, *data)
    assert f"dataset 'local/gone' cannot be read from folder '{tmp_path / 'gone'}'" in message
    assert "name one with --dataset-repo-id and --dataset-root" in message


def test_toys_flags_hold_in_any_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hf_memopt.recipes.reflow.smolvla_toy import dataset_flags, policy_flags

    monkeypatch.chdir(tmp_path)
    assert f"--policy.vlm_model_name={tmp_path / 'vlm'}" in policy_flags(Path("vlm"))
    assert f"--dataset.root={tmp_path / 'data'}" in dataset_flags(Path("data"))


def test_doctor_finds_the_teacher_on_the_host(toy_student: Path, tmp_path: Path, capsys: Capture) -> None:
    student = Path(shutil.copytree(toy_student, tmp_path / "student"))
    config = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps({**config, "teacher_offload": "swap"}))
    assert main(["doctor", "--policy", str(student), "--device", "cpu"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert f"Policy {student}: smolvla_reflow on cpu" in lines
    assert f"Checkpoint: {config['teacher_model_path']}" in lines
    assert "Device: cpu" in lines
    assert "Status: ✓ ON CPU (offloaded)" in lines


def test_doctor_refuses_a_policy_without_teacher(toy_teacher: Path, capsys: Capture) -> None:
    assert "has no teacher: its policy is of type 'smolvla'" in refused(capsys, "doctor", "--policy", str(toy_teacher))
