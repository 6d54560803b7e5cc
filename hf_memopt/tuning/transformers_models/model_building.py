"""A transformers model as it is trained: quantised, with adapters, checkpointed."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hf_memopt.activations.checkpointing.selective import apply_selective_checkpointing
from hf_memopt.estimate.simulation.quantised.quantised_base import quantise
from hf_memopt.tuning.transformers_models.adapters import with_adapters
from hf_memopt.tuning.transformers_models.model_options import ModelOptions
from hf_memopt.tuning.transformers_models.tasks import TASKS

CHECKPOINTING = ("none", "selective", "full")


def build_model(options: ModelOptions, config: Any, checkpointing: str) -> nn.Module:
    """Return a model in training mode.

    Args:
        options: what it is trained with.
        config: the options', or one with fewer layers.
        checkpointing: one of `CHECKPOINTING`: "selective" (`apply_selective_checkpointing`), "full" (transformers').

    Raises:
        ValueError: no model can be built from the configuration, or it has no layers for the adapters.
    """
    dtype = getattr(torch, options.dtype)
    attention = None if options.attention == "auto" else options.attention
    # Weights that are quantised reach the device in their final form alone.
    with torch.device("cpu") if options.quantize != "none" else nullcontext():
        model: Any = TASKS[options.kind].build(config, options.source, dtype=dtype, attn_implementation=attention)
    model.config.use_cache = False
    model.train()
    if options.quantize != "none":
        quantise(model, options.quantize, dtype)
    if options.lora_rank is not None:
        model = with_adapters(model, options.lora_rank, options.lora_targets, options.use_dora)
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if checkpointing == "selective":
        apply_selective_checkpointing(model)
    return model  # type: ignore[no-any-return]
