import json
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from safetensors.torch import save_file

processors = LateModule("hf_memopt.lerobot.files.checkpoint_files")

PREPROCESSOR_FILE, POSTPROCESSOR_FILE = "policy_preprocessor.json", "policy_postprocessor.json"
STATE_FILE = "policy_preprocessor_step_0.safetensors"
Step = dict[str, Any]
NORMALIZER: Step = {"registry_name": "normalizer_processor", "config": {}, "state_file": STATE_FILE}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with two processors, their files, and a file that is no state."""
    save_file({"action.mean": torch.zeros(2)}, tmp_path / STATE_FILE)
    (tmp_path / "config.json").write_text("{}")
    write_steps(tmp_path / PREPROCESSOR_FILE, NORMALIZER, {"registry_name": "device_processor"})
    write_steps(tmp_path / POSTPROCESSOR_FILE, {"registry_name": "unnormalizer_processor"})
    return tmp_path


def write_steps(file: Path, *steps: Step) -> None:
    file.write_text(json.dumps({"name": "processor", "steps": steps}))


def test_the_files_are_the_configurations_and_the_states_that_they_name(folder: Path) -> None:
    names = [PREPROCESSOR_FILE, STATE_FILE, POSTPROCESSOR_FILE]
    assert processors.check_processors(folder) == [folder / name for name in names]


def test_folders_beside_the_configuration_belong_to_it(folder: Path) -> None:
    """Check a folder as lerobot 0.6.2 saves it for a tokenizer."""
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / "tokenizer" / name).write_text("{}")
    step: Step = {"registry_name": "tokenizer_processor", "artifacts": {"tokenizer_name": "tokenizer"}}
    write_steps(folder / PREPROCESSOR_FILE, step)
    names = [PREPROCESSOR_FILE, "tokenizer/chat_template.jinja", "tokenizer/tokenizer.json", POSTPROCESSOR_FILE]
    assert processors.check_processors(folder) == [folder / name for name in names]
    (folder / "tokenizer" / "tokenizer.json").unlink()
    (folder / "tokenizer" / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match=r"tokenizer\.json is a link out of its folder, to /etc/hostname"):
        processors.check_processors(folder)


def test_steps_are_read_in_their_order(folder: Path) -> None:
    assert processors.read_steps(folder / PREPROCESSOR_FILE) == [NORMALIZER, {"registry_name": "device_processor"}]


@pytest.mark.parametrize("name", [PREPROCESSOR_FILE, POSTPROCESSOR_FILE])
def test_a_policy_without_processors_is_to_be_converted(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"has no {name}; .*migrate_policy_normalization --pretrained-path <folder>"):
        processors.check_processors(folder)


@pytest.mark.parametrize("steps", [None, {}, "device_processor", ["device_processor"]])
def test_steps_must_be_a_list_of_objects(steps: Any, folder: Path) -> None:
    file = folder / POSTPROCESSOR_FILE
    file.write_text(json.dumps({"steps": steps}))
    with pytest.raises(ValueError, match=f"{file}: steps must be a list of objects; copy the checkpoint again"):
        processors.check_processors(folder)


def artifacts(folders: Any) -> Step:
    return {"registry_name": "device_processor", "artifacts": folders}


STEPS: dict[str, tuple[Step, str]] = {
    "a class beside a name": ({"registry_name": "device_processor", "class": "os.mkdir"}, "a step is 'os.mkdir'"),
    "an unknown name": ({"registry_name": "own_step"}, "a step is 'own_step'.*allowed are rename_observations"),
    "no name": ({"config": {}}, "a step is None"),
    "a name that is a list": ({"registry_name": ["device_processor"]}, "a step is \\['device_processor'\\]"),
    "settings that are a list": ({"registry_name": "device_processor", "config": []}, "must be an object"),
    "a state elsewhere": ({"registry_name": "device_processor", "state_file": "../x"}, "must be the name of a file"),
    "an absolute state": ({"registry_name": "device_processor", "state_file": "/etc/passwd"}, "must be the name of"),
    "a state that is null": ({"registry_name": "device_processor", "state_file": None}, "must be the name of a file"),
    "the folder above": ({"registry_name": "device_processor", "state_file": ".."}, "has no \\.\\."),
    "a missing state": ({"registry_name": "device_processor", "state_file": "x.safetensors"}, "has no x.safetensors"),
    "a state that is a folder": ({"registry_name": "device_processor", "state_file": "."}, "must be the name of"),
    "artifacts that are a list": (artifacts(["x"]), "artifacts=.* an object"),
    "an artifact above": (
        {"registry_name": "device_processor", "artifacts": {"a": ".."}},
        "'..', which must be a f",
    ),
    "an artifact elsewhere": (
        {"registry_name": "device_processor", "artifacts": {"a": "/etc"}},
        "must be a folder b",
    ),
    "a missing artifact": (
        {"registry_name": "device_processor", "artifacts": {"a": "x"}},
        "must be a folder b",
    ),
    "an artifact that is null": (artifacts({"a": None}), "must be a folder b"),
    "a state of JSON": ({"registry_name": "device_processor", "state_file": "config.json"}, "truncated or damaged"),
}


@pytest.mark.parametrize("name", [PREPROCESSOR_FILE, POSTPROCESSOR_FILE])
@pytest.mark.parametrize("defect", STEPS)
def test_steps_that_are_refused(defect: str, name: str, folder: Path) -> None:
    step, message = STEPS[defect]
    write_steps(folder / name, {"registry_name": "to_batch_processor"}, step)
    with pytest.raises(ValueError, match=message) as caught:
        processors.check_processors(folder)
    assert str(folder) in str(caught.value)


def test_a_checkpoint_is_checked_before_lerobot_makes_anything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        "hf_memopt.lerobot.files.checkpoint_files.make_pre_post_processors",
        lambda config, **options: made.append(options) or ("pre", "post"),
    )
    assert processors.load_processors(None, folder, {"device_processor": {"device": "cpu"}}) == ("pre", "post")
    assert made == [{"pretrained_path": str(folder), "preprocessor_overrides": {"device_processor": {"device": "cpu"}}}]
    write_steps(folder / PREPROCESSOR_FILE, {"registry_name": "own_step"})
    with pytest.raises(ValueError, match="a step is 'own_step'"):
        processors.load_processors(None, folder, {})
    assert len(made) == 1


def test_what_lerobot_cannot_make_is_named_with_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: object, **options: object) -> None:
        raise TypeError("padding_side is sideways")

    monkeypatch.setattr("hf_memopt.lerobot.files.checkpoint_files.make_pre_post_processors", refuse)
    with pytest.raises(ValueError, match=f"{folder} cannot be made: padding_side is sideways; correct that setting"):
        processors.load_processors(None, folder, {})
