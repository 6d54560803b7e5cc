"""Accelerate in a simulation: a process alone or the first of several, and how models are prepared."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator, accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch import nn

# The variables by which launchers tell a process its place, and accelerate to use the CPU or to shard.
_LAUNCHED = ("ACCELERATE_USE_CPU", "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_ENGINES = ("ACCELERATE_USE_FSDP", "FSDP_", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_")


@contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """Put an `Accelerator` made inside on the virtual device, alone, however this process was launched."""
    AcceleratorState._reset_state(reset_partial_state=True)
    environment = {
        name: value for name, value in os.environ.items() if name not in _LAUNCHED and not name.startswith(_OF_ENGINES)
    }
    with (
        patch.dict(os.environ, environment, clear=True),
        patch.object(torch.distributed, "is_initialized", lambda: False),
        patch.object(PartialState, "default_device", device),
    ):
        yield


@contextmanager
def first_of_ranks(
    num_ranks: int, device: torch.device, backend: str, begin_zero: Callable[[], None]
) -> Iterator[None]:
    """Make an `Accelerator` the first of so many; `begin_zero` is called before it starts DeepSpeed."""
    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    places |= {"ACCELERATE_TORCH_DEVICE": str(device), "DS_ACCELERATOR": "cpu"}
    AcceleratorState._reset_state(reset_partial_state=True)

    def prepare_backend(*options: Any) -> tuple[str, DistributedType]:
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            begin_zero()
        return backend, DistributedType.MULTI_GPU

    with patch.dict(os.environ, places), patch.object(PartialState, "_prepare_backend", prepare_backend):
        yield


def adapters_kept_by_fsdp() -> AbstractContextManager[Any]:
    """Make FSDP2 shard trained weights in their own dtype, as Accelerate does next to 4 bits that are packed in floats.

    It asks for the weights' class, `Params4bit`, which weights without memory cannot be of.
    """
    plain = accelerator.fsdp2_prepare_model

    def prepare(by: Accelerator, model: nn.Module) -> nn.Module:
        with _in_precision(by, "no"):
            sharded: nn.Module = plain(by, model)
        return sharded

    return patch.object(accelerator, "fsdp2_prepare_model", prepare)


def prepare_in(precision: str, by: Accelerator) -> None:
    """Make an `Accelerator` prepare models for a precision, and all else for its own, which has no scaler."""
    plain = by.prepare_model

    def prepare_model(*args: Any, **options: Any) -> Any:
        with _in_precision(by, precision):
            return plain(*args, **options)

    by.prepare_model = prepare_model


def take_off(module: nn.Module) -> bool:
    """Take the wrappers of another `Accelerator` off a module; return whether there were any.

    Accelerate's own unwrapping also takes off wrappers below its own, such as TRL's losses.
    """
    was_prepared = bool(vars(module).pop("_is_accelerate_prepared", False))
    if "_original_forward" in vars(module):
        module.forward = vars(module).pop("_original_forward")
    return was_prepared


def _in_precision(by: Accelerator, precision: str) -> AbstractContextManager[Any]:
    """Show a precision to the methods of an `Accelerator`, which read it from its state."""
    return patch.object(by.state, "_mixed_precision", precision)
