"""Tests that a checkpoint's files never run anything, and that its links lead nowhere else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule

from hf_memopt.cli import main

policy_files = LateModule("hf_memopt.lerobot.files.policy_files")
processors = LateModule("hf_memopt.lerobot.files.checkpoint_files")
model_card = LateModule("hf_memopt.lerobot.student.model_card")
smolvla_toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
reflow_smolvla = LateModule("hf_memopt.recipes.reflow_smolvla")
policies = LateModule("lerobot.policies")
modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")
lerobot_runs = LateModule("lerobot_runs")


PREPROCESSOR_FILE = "policy_preprocessor.json"
Step = dict[str, Any]
Capture = pytest.CaptureFixture[str]
ON_THE_CPU = {"device_processor": {"device": "cpu"}}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A path at which a folder appears if a payload runs."""
    return tmp_path / "trace"


def edit_json(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(document))


def calls(trace: Path) -> Step:
    """Return a step that lerobot's loader calls."""
    return {"class": "os.mkdir", "config": {"path": str(trace)}}


def with_step(source: Path, copy: Path, step: Step) -> Path:
    shutil.copytree(source, copy)
    edit_json(copy / PREPROCESSOR_FILE, lambda document: document["steps"].append(step))
    return copy


def write_remote_code(folder: Path, trace: Path) -> Path:
    """Write a repository whose tokenizer and processor are code of its own."""
    folder.mkdir()
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(trace)!r})\nclass Evil: pass\n")
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
    (folder / "processor_config.json").write_text('{"auto_map": {"AutoProcessor": "evil.Evil"}}')
    return folder


# ------------------------------------------------------------------------------------------------- nothing is run

COMMANDS: dict[str, list[str]] = {
    "prepare-student": ["prepare-student", "--teacher", "HOSTILE", "--output", "OUTPUT"],
    "export": ["export", "--policy", "HOSTILE", "--output", "OUTPUT", "--dataset-repo-id", "REPO_ID"],
    "export without measuring": ["export", "--policy", "HOSTILE", "--output", "OUTPUT", "--no-evaluation"],
    "evaluate": ["evaluate", "--policy", "HOSTILE", "--output", "OUTPUT", "--dataset-repo-id", "REPO_ID"],
    "evaluate, teacher": ["evaluate", "--policy", "STUDENT", "--teacher", "HOSTILE", "--output", "OUTPUT"],
    "evaluate in an environment": [
        *("evaluate", "--policy", "HOSTILE", "--output", "OUTPUT", "--env", "tiny_environment:Reach-v0"),
    ],
    "precompute": ["precompute", "--output", "OUTPUT", "--", "TRAINING"],
    "doctor": ["doctor", "--policy", "HOSTILE"],
    "doctor, teacher": ["doctor", "--policy", "TAUGHT"],
}


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_smolvla.SmolVLAPolicy, "__init__", lambda *_, **__: pytest.fail("a model was built"))


@pytest.fixture
def hostile(toy_student: Path, tmp_path: Path, trace: Path) -> Path:
    return with_step(toy_student, tmp_path / "hostile", calls(trace))


def taught_by(teacher: Path, student: Path, copy: Path) -> Path:
    shutil.copytree(student, copy)
    edit_json(copy / "config.json", lambda config: config.update(teacher_model_path=str(teacher)))
    return copy


def test_lerobots_loader_runs_the_payload(hostile: Path, trace: Path) -> None:
    """Show by the control that without the check all later tests would fail."""
    with pytest.raises(Exception, match=r"."):
        policies.make_pre_post_processors(
            policy_files.load_config(hostile), pretrained_path=str(hostile), preprocessor_overrides=ON_THE_CPU
        )
    assert trace.exists()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_what_a_checkpoint_names(
    command: str, hostile: Path, trace: Path, toy_student: Path, toy_dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    places = {
        "HOSTILE": [str(hostile)],
        "STUDENT": [str(toy_student)],
        "TAUGHT": [str(taught_by(hostile, toy_student, tmp_path / "taught"))],
        "OUTPUT": [str(tmp_path / "output")],
        "REPO_ID": [smolvla_toy.REPO_ID],
        "TRAINING": [f"--policy.path={hostile}", "--policy.push_to_hub=false", *smolvla_toy.dataset_flags(toy_dataset)],
    }
    assert main([word for each in COMMANDS[command] for word in places.get(each, [each])]) == 2
    message = capsys.readouterr().err
    assert f"{hostile / PREPROCESSOR_FILE}: a step is 'os.mkdir'" in message
    assert message.count("\n") == 1 or command == "precompute"  # lerobot logs
    assert not trace.exists()
    assert not (tmp_path / "output").exists()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("hostile_teacher", [False, True])
@pytest.mark.parametrize("command", ["recipe", "lerobot"])
def test_training_does_not_run_it_either(
    command: str,
    hostile_teacher: bool,
    hostile: Path,
    trace: Path,
    toy_student: Path,
    toy_dataset: Path,
    tmp_path: Path,
) -> None:
    start = taught_by(hostile, toy_student, tmp_path / "taught") if hostile_teacher else hostile
    train = reflow_smolvla.main if command == "recipe" else lerobot_runs.lerobot_train
    flags = [] if command == "recipe" else [lerobot_runs.PLUGIN]
    with pytest.raises(ValueError, match=r"hostile/policy_preprocessor.json: a step is 'os.mkdir'"):
        lerobot_runs.run(train, *flags, *lerobot_runs.train_flags(start, toy_dataset, tmp_path / "run", steps=1))
    assert not trace.exists()


# ------------------------------------------------------------------------------------------- refused payloads, alone


def test_a_registered_step_runs_code_of_a_repository(
    toy_student: Path, tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show why the allowed steps are SmolVLA's and not all registered ones."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    named = str(write_remote_code(tmp_path / "repository", trace))
    step = {"registry_name": "action_tokenizer_processor", "config": {"action_tokenizer_name": named}}
    folder = with_step(toy_student, tmp_path / "student", step)
    with pytest.raises(ValueError, match="a step is 'action_tokenizer_processor'"):
        processors.load_processors(policy_files.load_config(folder), folder, ON_THE_CPU)
    assert not trace.exists()
    with pytest.raises(ValueError, match="action_tokenizer_processor"):
        policies.make_pre_post_processors(
            policy_files.load_config(folder), pretrained_path=str(folder), preprocessor_overrides=ON_THE_CPU
        )
    assert trace.exists()


def test_a_tokenizer_with_code_of_its_own_is_refused_even_if_a_user_would_say_yes(
    toy_student: Path, tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    named = str(write_remote_code(tmp_path / "repository", trace))
    folder = Path(shutil.copytree(toy_student, tmp_path / "student"))

    def rename(document: dict[str, Any]) -> None:
        for step in document["steps"]:
            if step["registry_name"] == "tokenizer_processor":
                step["config"]["tokenizer_name"] = named

    edit_json(folder / PREPROCESSOR_FILE, rename)
    with pytest.raises(ValueError, match=rf"the processors in {folder} cannot be made: .*tokenizer"):
        processors.load_processors(policy_files.load_config(folder), folder, ON_THE_CPU)
    assert not trace.exists()
    with pytest.raises(ValueError, match="tokenizer"):
        policies.make_pre_post_processors(
            policy_files.load_config(folder), pretrained_path=str(folder), preprocessor_overrides=ON_THE_CPU
        )
    assert trace.exists()


# ------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("command", ["prepare-student --teacher", "export --no-evaluation --policy"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", PREPROCESSOR_FILE])
def test_a_link_out_of_the_folder_is_refused(
    name: str, command: str, toy_student: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = Path(shutil.copytree(toy_student, tmp_path / "student"))
    secret = (folder / name).rename(tmp_path / "secret")
    (folder / name).symlink_to(secret)
    assert main([*command.split(), str(folder), "--output", str(tmp_path / "output")]) == 2
    assert f"{folder / name} is a link out of its folder, to {secret}" in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


def test_only_what_the_processors_name_is_published(toy_student: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(toy_student, tmp_path / "student"))
    (tmp_path / "secret").write_text("a secret")
    (folder / "policy_processor_notes.json").symlink_to(tmp_path / "secret")
    output = tmp_path / "exported"
    assert main(["export", "--no-evaluation", "--policy", str(folder), "--output", str(output)]) == 0
    assert {file.name for file in output.iterdir()} == {file.name for file in toy_student.iterdir()} | {"README.md"}


# -------------------------------------------------------------------------------------------------------- model card


@pytest.mark.parametrize("teacher", ["you/teacher", "/home/you/teacher", "PAYLOAD"])
def test_names_are_plain_text_in_the_card(teacher: str, toy_student: Path, tmp_path: Path) -> None:
    payload = "you/x`\n---\nlicense: mine\n---\n# Title\n<script>alert(1)</script> | [a](javascript:b) "
    folder = taught_by(Path("unused"), toy_student, tmp_path / "student")
    named = payload if teacher == "PAYLOAD" else teacher
    edit_json(folder / "config.json", lambda config: config.update(teacher_model_path=named))
    lines = model_card.write_card(str(folder), 1, None).splitlines()
    assert ("base_model: you/teacher" in lines) == (teacher == "you/teacher")
    assert any("reflow (arXiv 2209.03003) from `you/teacher` with" in line for line in lines) == (
        teacher == "you/teacher"
    )
    (folder / "train_config.json").write_text(
        json.dumps({"dataset": {"repo_id": payload}, "steps": payload, "optimizer": [payload]})
    )
    card = model_card.write_card(str(folder), 1, None).splitlines()
    added = [line for line in card if line not in lines]
    shown = "you/x??---?license: mine?---?? Title??script?alert(1)?/script? ? ?a?(javascript:b) "
    assert added == [f"| {name} | {shown} |" for name in ("steps", "dataset")]
    assert [line for line in card if line not in added] == lines
