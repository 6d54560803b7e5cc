"""A transformers model as it is trained: quantised, with adapters, checkpointed."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import set_quantized_state

from hf_memopt.activations.checkpointing.selective import apply_selective_checkpointing
from hf_memopt.estimate.simulation.quantised.quantised_base import quantise
from hf_memopt.jobs.accelerate_config import DDP
from hf_memopt.jobs.transformers_models.adapters import import_fused_head, with_adapters
from hf_memopt.jobs.transformers_models.model_options import ModelOptions


def build_model(options: ModelOptions, config: Any, checkpointing: str) -> nn.Module:
    """Build from `config`, which is the options' or one with fewer layers."""
    task = options.kind_of_task
    dtype = getattr(torch, options.dtype)
    attention = None if options.attention == "auto" else options.attention
    # Quantised or sharded weights reach the device in their final form.
    place = nullcontext() if (options.quantize, options.engine) == ("none", DDP) else torch.device("cpu")
    with place, set_quantized_state() if options.quantize != "none" else nullcontext():
        model: Any = task.build(config, options.source, dtype=dtype, attn_implementation=attention)
    if isinstance(model.config, PretrainedConfig):
        model.config.use_cache = model.config.get_text_config().use_cache = False
        if getattr(model.config, "pad_token_id", 0) is None:
            model.config.pad_token_id = 0  # decoders that classify look for the last token that is none
    model.train()
    frozen = None
    if options.freeze_vision_tower:
        tower = model.get_encoder(modality="image").requires_grad_(False)
        frozen = next(name for name, module in model.named_modules() if module is tower)
    if options.quantize != "none":
        multiplied = getattr(torch, options.published.compute_dtype or options.dtype)
        quantise(
            model,
            options.quantize,
            multiplied,
            is_prepared=options.kbit_preparation == "peft",
            quantises=task.quantises(model),
            kept=options.published.kept,
            storage=getattr(torch, options.packed_in),
        )
    if options.loss == "chunked":
        import_fused_head()(model, outputs=("log_probs", "entropy", "is_top1"))  # as SFTTrainer asks for
    if options.lora_rank is not None:
        targets = options.lora_targets or task.lora_targets(config)
        model = with_adapters(model, options.lora_rank, targets, options.use_dora, frozen, task.peft_type)
        if options.adapters_dtype is not None:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(options.adapters_dtype)
    if checkpointing in ("full", "reentrant"):
        task.checkpoint(model, use_reentrant=checkpointing == "reentrant")
    if checkpointing == "selective":
        apply_selective_checkpointing(model)
    return model  # type: ignore[no-any-return]
