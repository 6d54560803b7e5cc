"""Reads a checkpoint's files as data: refuses files elsewhere, and code."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from safetensors import SafetensorError, safe_open
from transformers import dynamic_module_utils

from hf_memopt.text_files import read_values

COPY_AGAIN = "copy the checkpoint again"


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
