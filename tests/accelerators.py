"""Resets of Accelerate, which keeps its settings for the whole process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState


def forget_accelerator() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Run on the CPU, also on a machine with a GPU, with settings of its own."""
    forget_accelerator()
    with patch.dict(os.environ, {"ACCELERATE_USE_CPU": "true"}):
        yield
    forget_accelerator()


@contextmanager
def engines_on_the_cpu() -> Iterator[None]:
    """Use FSDP2 and DeepSpeed as on a GPU: for processes on the CPU Accelerate would ignore them."""
    AcceleratorState._reset_state(reset_partial_state=True)
    places = {
        "ACCELERATE_USE_CPU": "false",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        "ACCELERATE_BYPASS_DEVICE_MAP": "true",
    }
    with (
        patch.dict(os.environ, places),
        patch.object(PartialState, "_prepare_backend", lambda *options: ("gloo", DistributedType.MULTI_GPU)),
    ):
        yield


def sharding_on_the_cpu(**options: Any) -> Accelerator:
    """Return an `Accelerator` that shards as on a GPU."""
    with engines_on_the_cpu():
        return Accelerator(**options)
