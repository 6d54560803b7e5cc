"""Processors that normalise a policy's inputs and outputs: checked as files, and only then made by lerobot."""

from pathlib import Path
from typing import Any

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies import make_pre_post_processors

from hf_memopt.lerobot.files.checkpoint_files import COPY_AGAIN, check_header, file_in, no_remote_code, read_object

PREPROCESSOR_FILE = "policy_preprocessor.json"
POSTPROCESSOR_FILE = "policy_postprocessor.json"
# The steps that lerobot saves for a SmolVLA, a π0 and a π0.5. Of its other registered steps, some load models, and
# action_tokenizer_processor runs the code of a repository that the file names.
STEPS = (
    "rename_observations_processor",
    "to_batch_processor",
    "smolvla_new_line_processor",
    "pi0_new_line_processor",
    "pi05_prepare_state_tokenizer_processor_step",
    "tokenizer_processor",
    "device_processor",
    "normalizer_processor",
    "unnormalizer_processor",
    "relative_actions_processor",
    "absolute_actions_processor",
)
_CONVERT = (
    "so its normaliser is unknown; convert an old policy with "
    "`python -m lerobot.processor.migrate_policy_normalization --pretrained-path <folder>`"
)


def check_processors(folder: Path) -> list[Path]:
    """Return both configurations, and the states and folders (of a tokenizer, from lerobot 0.6.2 on) that they name.

    Raises ValueError where a file is missing (as in policies saved before lerobot 0.4), damaged, or a link out of the
    folder, or a step is none of `STEPS`: lerobot imports and calls the object that a step names as its `class`.
    """
    files = []
    for name in (PREPROCESSOR_FILE, POSTPROCESSOR_FILE):
        file = file_in(folder, name, _CONVERT)
        steps = read_steps(file)
        files += [file, *(_state_file(file, step) for step in steps if "state_file" in step)]
        files += [artifact for step in steps for artifact in _artifacts(file, step)]
    return files


def read_steps(file: Path) -> list[dict[str, Any]]:
    """Read the steps of a processor's configuration; ValueError for one that is none of `STEPS`."""
    steps = read_object(file).get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ValueError(f"{file}: steps must be a list of objects; {COPY_AGAIN}")
    for step in steps:
        if "class" in step or step.get("registry_name") not in STEPS:
            named = step.get("class", step.get("registry_name"))
            raise ValueError(
                f"{file}: a step is {named!r}, and lerobot would import or load what it names; allowed are "
                f"{', '.join(STEPS)}. Take out the step if you wrote it, and do not use the file if you did not"
            )
        if not isinstance(step.get("config", {}), dict):
            raise ValueError(f"{file}: config={step['config']!r} of {step['registry_name']} must be an object")
    return steps


def load_processors(config: PreTrainedConfig, folder: Path, overrides: dict[str, Any]) -> tuple[Any, Any]:
    """Make lerobot's pre- and postprocessor from a folder; `overrides` are settings of the former's steps, by name."""
    check_processors(folder)
    try:
        with no_remote_code():
            return make_pre_post_processors(config, pretrained_path=str(folder), preprocessor_overrides=overrides)
    except Exception as error:
        raise ValueError(f"the processors in {folder} cannot be made: {error}; correct that setting") from error


def blank_observation(config: PreTrainedConfig, preprocess: Any) -> dict[str, torch.Tensor]:
    frame = {name: torch.zeros(feature.shape) for name, feature in config.input_features.items()}
    return preprocess({**frame, "task": ""})


def _artifacts(file: Path, step: dict[str, Any]) -> list[Path]:
    """Return the files of the folders that a step has beside the configuration; their names replace its settings."""
    folders = step.get("artifacts", {})
    if not isinstance(folders, dict):
        raise ValueError(f"{file}: artifacts={folders!r} must be an object; {COPY_AGAIN}")
    found = []
    for name in folders.values():
        beside = isinstance(name, str) and (file.parent / name).resolve().parent == file.parent.resolve()
        if not beside or not (file.parent / name).is_dir():
            raise ValueError(f"{file}: artifacts names {name!r}, which must be a folder beside it; {COPY_AGAIN}")
        inside = sorted((file.parent / name).iterdir())
        found += [file_in(file.parent, str(each.relative_to(file.parent))) for each in inside]
    return found


def _state_file(file: Path, step: dict[str, Any]) -> Path:
    name = step["state_file"]
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"{file}: state_file={name!r} must be the name of a file beside it; {COPY_AGAIN}")
    state = file_in(file.parent, name)
    check_header(state)
    return state
