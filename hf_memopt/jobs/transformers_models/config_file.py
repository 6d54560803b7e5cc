"""The text of a model's configuration, and errors that say which other thing was named instead of one."""

import difflib
import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig, __version__

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_OWN_STEP = "write setup and step yourself and call hf_memopt.estimate_peak_memory"


class NotFoundError(ValueError):
    """No folder, no file, and no downloaded model has this name."""


def read_values(model: str) -> dict[str, Any]:
    """Return the fields of a config.json: in a folder, a file, or on the hub.

    Raises:
        ValueError: there is none, it is no JSON object, or it is that of a LeRobot policy.
    """
    place = Path(model)
    if place.exists():
        values = _parsed(place if place.is_file() else _in_folder(place))
    else:
        try:
            values = PretrainedConfig.get_config_dict(model)[0]
        except (OSError, ValueError) as error:
            raise NotFoundError(_not_found(model, error)) from error
    if "model_type" not in values and "type" in values:
        raise ValueError(
            f"model={model!r} is a LeRobot policy of type {values['type']!r}, and no transformers model; for the "
            f"distillation of a SmolVLA give recipe='reflow_smolvla'; for another training, {_OWN_STEP}"
        )
    return values


def check_model_type(values: dict[str, Any], source: str) -> None:
    """Raise ValueError for fields of which transformers has no class, with the remedy."""
    model_type = values.get("model_type")
    if model_type in CONFIG_MAPPING:
        return
    if "auto_map" in values:
        raise ValueError(
            f"{source}: transformers has no model_type={model_type!r}; the model's code lies in its repository "
            f"(auto_map) and is not run; {_OWN_STEP}"
        )
    if model_type is None:
        raise ValueError(f"{source}: its config.json has no model_type, by which transformers finds its class; add it")
    raise ValueError(
        f"{source}: transformers {__version__} has no model_type={model_type!r}; correct it, or update transformers"
    )


def _in_folder(folder: Path) -> Path:
    if (folder / _CONFIG).is_file():
        return folder / _CONFIG
    if (folder / _ADAPTER).is_file():
        adapter = _parsed(folder / _ADAPTER)
        raise ValueError(
            f"model={str(folder)!r} holds an adapter of PEFT; give the model that it is for, "
            f"{adapter.get('base_model_name_or_path')}, with lora_rank={adapter.get('r')}"
        )
    raise ValueError(f"model={str(folder)!r}: there is no {_CONFIG} in this folder; name one with a {_CONFIG}")


def _parsed(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        is_trailing = error.doc[error.pos :][:1] in ("}", "]") and error.doc[: error.pos].rstrip().endswith(",")
        wrong = "a comma before the closing bracket" if is_trailing else error.msg
        raise ValueError(f"model={str(path)!r}, line {error.lineno}: not JSON ({wrong}); correct it") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"model={str(path)!r} is no text; name a {_CONFIG}, or the folder with it") from error
    if not isinstance(values, dict):
        raise ValueError(f"model={str(path)!r} holds a {type(values).__name__}, and no object with fields; correct it")
    return values


def _not_found(model: str, error: Exception) -> str:
    place = Path(model)
    siblings = [each.name for each in place.parent.iterdir()] if place.parent.is_dir() else []
    alike = difflib.get_close_matches(place.name, siblings, n=1)
    if alike:
        return f"there is no folder model={model!r}; there is {place.parent / alike[0]}"
    if place.parent != Path() and place.parent.is_dir():
        return f"there is no folder model={model!r} in {place.parent}; name a folder with a {_CONFIG}, or a hub id"
    return (
        f"model={model!r}: no configuration was found; pass a folder with a {_CONFIG}, such a file, or a hub id (when "
        f"offline, one that was downloaded before): {error}"
    )
