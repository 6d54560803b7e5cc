"""A checkpoint's files, checked as data: files elsewhere and code are refused, and only then processors are made.

Processors normalise a policy's inputs and outputs. A PEFT adapter may stand in place of weights.
"""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies import make_pre_post_processors
from lerobot.policies.pretrained import PreTrainedPolicy
from safetensors import SafetensorError, safe_open
from transformers import dynamic_module_utils

from hf_memopt.text_files import read_values

COPY_AGAIN = "copy the checkpoint again"
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
# As lerobot's `--peft.*` leaves them.
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_BASE = "base_model_name_or_path"


def file_in(folder: Path, name: str, remedy: str = "pass a complete checkpoint folder") -> Path:
    """Return a file of a checkpoint's folder, or raise ValueError.

    A link may lead to another file of the folder, and in the hub's cache to a blob.
    """
    file = folder / name
    if not os.path.isfile(file):
        raise ValueError(f"{folder} has no {name}; {remedy}")
    home, target = folder.resolve(), file.resolve()
    # <repository>/snapshots/<commit>/config.json leads to <repository>/blobs/<hash>.
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    if not target.is_relative_to(home) and not target.is_relative_to(blobs):
        raise ValueError(f"{file} is a link out of its folder, to {target}; replace it by a copy of that file")
    return file


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; ValueError if it holds something else."""
    try:
        found = read_values(file)
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); {COPY_AGAIN}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds {type(found).__name__} and no JSON object; {COPY_AGAIN}")
    return found


def check_header(file: Path) -> None:
    """Raise ValueError for a truncated safetensors file, by its header, without loading a tensor."""
    try:
        with safe_open(file, framework="pt"):
            return
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or damaged ({error}); {COPY_AGAIN}") from error


def no_remote_code() -> AbstractContextManager[Any]:
    """Make transformers refuse models and tokenizers that ship code; lerobot has no argument for this."""
    return patch.object(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0)


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG_FILE).is_file()


def adapter_files(folder: Path) -> list[Path]:
    """Return an adapter's own two files; ValueError if one is missing, damaged or a link out of the folder."""
    files = [file_in(folder, name) for name in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE)]
    check_header(files[1])
    return files


def base_name(folder: Path) -> str:
    """Return the folder or hub id of the policy that an adapter was trained on."""
    file = file_in(folder, ADAPTER_CONFIG_FILE)
    name = read_object(file).get(_BASE)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{file} names no base policy; write its folder or hub id into {_BASE}")
    return name


def merged(policy: PreTrainedPolicy, folder: Path) -> PreTrainedPolicy:
    """Add an adapter to its base policy's weights, in place, and return the policy; ValueError if that cannot be."""
    from peft import PeftModel, get_peft_model_state_dict  # slow to import, and an extra

    adapter_files(folder)
    try:
        model = PeftModel.from_pretrained(policy, folder, torch_device="cpu")
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        first = " ".join(str(error).split("\n\t")[:2])  # of as many lines as there are weights
        raise ValueError(f"the adapter in {folder} does not fit its base policy: {first}") from error
    with safe_open(folder / ADAPTER_WEIGHTS_FILE, framework="pt") as saved:
        different = sorted(set(saved.keys()) ^ get_peft_model_state_dict(model).keys())
    if different:
        raise ValueError(
            f"the adapter in {folder} does not fit its base policy: {', '.join(different[:3])} is on one side alone; "
            "pass the folder as training left it"
        )
    try:
        return model.merge_and_unload()
    except (AttributeError, NotImplementedError) as error:
        kind = getattr(model.active_peft_config.peft_type, "value", "?")
        raise ValueError(
            f"the adapter in {folder} is of a kind that has no weights to merge ({kind}); train one of LoRA's kind"
        ) from error


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
