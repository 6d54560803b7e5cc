"""Slow modules that tests name at the top, and import at first use, to keep collection fast."""

import importlib
from typing import Any

import pytest

# Modules that take seconds to import.
SLOW = (
    "lerobot",
    "trl",
    "datasets",
    "diffusers",
    "torchao",
    "neuralop",
    "peft",
    "matplotlib",
    "torchvision",
    "torch._dynamo",
)
IMPORTED_WHILE_COLLECTING = pytest.StashKey[list[str]]()


class LateModule:
    """Imports a module when one of its names is read; a string names the module to patch in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest asks each global of a test file for these, to see whether it is a fixture.
        if attribute.startswith("__") or attribute == "_mock_name":
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
