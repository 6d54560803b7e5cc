"""A plug-in that switches this library on from an axolotl YAML file.

plugins:
  - hf_memopt.integrations.axolotl.MemoptPlugin
memopt:
  budget_gib: 6
"""

from dataclasses import fields
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from transformers import Trainer

from hf_memopt.callbacks.arguments import MemoptArguments


class MemoptInputs(BaseModel):
    """The plug-in's part of the YAML file: `memopt`, with the fields of `MemoptArguments`."""

    memopt: dict[str, Any] | None = None


class MemoptPlugin(BasePlugin):
    """Attaches to the trainer that axolotl makes, as `hf_memopt.attach` does.

    Written against axolotl's interface of plug-ins (`axolotl.integrations.base`, commit 002a637 of its repository).
    Switch axolotl's own `activation_offloading` off.
    """

    def get_input_args(self) -> str:
        """Return the name of the class that checks the file's additional keys."""
        return f"{MemoptInputs.__module__}.{MemoptInputs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Attach with the options under `memopt` in the file; without it, the defaults.

        Raises:
            ValueError: `memopt` names no field or an invalid value, or something else offloads activations already.
        """
        given = dict(cfg.get("memopt") or {})
        known = [field.name for field in fields(MemoptArguments)]
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"memopt: {unknown[0]!r} sets no field; there are {', '.join(known)}")
        MemoptArguments(**given).attach(trainer)
