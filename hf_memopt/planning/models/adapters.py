"""Adapters of PEFT on a model that is simulated."""

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hf_memopt.planning.models.quiet import quiet
from hf_memopt.planning.simulation.quantised.quantised_base import adapt_as_peft_does

ALL_LINEAR = "all-linear"


def import_peft(lora_rank: int) -> Any:
    """Import PEFT, before processes are forked, since it takes a while."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ValueError(f"lora_rank={lora_rank} needs PEFT: pip install peft") from error
    return peft


def lora_config(about: Mapping[str, Any]) -> Any:
    """Return the adapters of TRL's ModelConfig, as TRL makes them."""
    from trl import get_peft_config

    return get_peft_config(SimpleNamespace(**about))


def cast_trained(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights that train, such as adapters."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def freeze_first_layers(model: Any, count: int) -> None:
    """Freeze a model's input embeddings and its first layers.

    Raises:
        ValueError: it has no more layers than that.
    """
    layers = max(
        (each for each in model.modules() if isinstance(each, nn.ModuleList)), key=len, default=nn.ModuleList()
    )
    if count >= len(layers):
        raise ValueError(f"freeze_layers={count}: the model has {len(layers)} layers; freeze fewer")
    for module in (model.get_input_embeddings(), *layers[:count]):
        module.requires_grad_(False)


def with_adapters(
    model: nn.Module, rank: int, targets: str, excluded: str | None = None, peft_type: str | None = None, **more: Any
) -> nn.Module:
    """Return PEFT's model.

    `targets` are names of layers, such as "q_proj,v_proj", or "all-linear", all but the output's; in the module
    `excluded` none has adapters. `peft_type` is PEFT's name of a task whose head is trained too. `more` are fields of
    LoraConfig.
    """
    peft = import_peft(rank)
    names = targets if targets == ALL_LINEAR else targets.split(",")
    outside = None if excluded is None else rf"(.*\.)?{re.escape(excluded)}\..*"
    try:
        config = peft.LoraConfig(r=rank, target_modules=names, exclude_modules=outside, task_type=peft_type, **more)
        with quiet():
            adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"lora_targets={targets!r}: PEFT finds no such layers in the model: {error}") from error
    adapt_as_peft_does(adapted)
    return adapted
