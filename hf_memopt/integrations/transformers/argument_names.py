"""Fields of TrainingArguments that have been renamed: versions of transformers that have both names read the older one
only where the newer has no value, and then keep both equal."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments

_NEWER = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}


def current_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields and their values by the names that the installed transformers prefers.

    Where both names of a field are given, the value of the newer one counts.
    """
    current = {name: _current_name(name) for name in given}
    return {new: given[name] for name, new in current.items() if new == name or new not in given}


def set_fields(arguments: TrainingArguments, values: Mapping[str, Any]) -> None:
    """Set fields of arguments that have been made, under both names where the installed transformers has two."""
    for name, value in values.items():
        for each in {name, _current_name(name)}:
            setattr(arguments, each, value)


def _current_name(name: str) -> str:
    newer = _NEWER.get(name, name)
    return newer if newer in {field.name for field in fields(TrainingArguments)} else name
