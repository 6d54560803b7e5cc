"""The recipe of a plan's command, with the files that the plan has written, for test_planned_recipe.py."""

import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from accelerators import engines_on_the_cpu
from torch import Tensor

from hf_memopt.recipes import train_sft
from hf_memopt.recipes.sft import options


def outcomes(flags: list[str]) -> list[float]:
    """Return losses; weights lie where the recipe saves them."""
    with ExitStack() as stack:
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            from zero_rank import deepspeed_on_the_cpu

            stack.enter_context(deepspeed_on_the_cpu())
        else:
            stack.enter_context(engines_on_the_cpu())
        # Its defaults are for a machine with a GPU, too.
        here = SimpleNamespace(is_available=lambda: True)
        stack.enter_context(patch.object(options, "torch", SimpleNamespace(accelerator=here)))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda tensor, *device: tensor))
        stack.enter_context(patch.object(Tensor, "is_pinned", lambda tensor, *device: True))
        log: list[dict[str, Any]] = train_sft.main(flags)
    return [entry["loss"] for entry in log if "loss" in entry]
