"""A checkpoint's files, read as data: refuses files elsewhere, and code. A PEFT adapter may stand for the weights."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lerobot.policies.pretrained import PreTrainedPolicy
from safetensors import SafetensorError, safe_open
from transformers import dynamic_module_utils

from hf_memopt.text_files import read_values

COPY_AGAIN = "copy the checkpoint again"
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
