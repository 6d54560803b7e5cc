"""Modules that tests name at the top and import when they first use them: collecting the suite must not cost the
seconds that lerobot, neuralop or Trainer take to import."""

import importlib
from typing import Any


class LateModule:
    """Stands for a module, imports it when an attribute is read or set, and passes both on to it."""

    def __init__(self, name: str) -> None:
        vars(self)["_name"] = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest asks each global of a test file for these, to see whether it is a fixture.
        if attribute.startswith("__") or attribute == "_mock_name":
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)

    def __setattr__(self, attribute: str, value: object) -> None:
        setattr(importlib.import_module(self._name), attribute, value)

    def __delattr__(self, attribute: str) -> None:
        delattr(importlib.import_module(self._name), attribute)
