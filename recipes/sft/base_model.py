"""The model that `train_sft.py` fine-tunes: full weights, or a frozen base, quantised or not, with adapters."""

import importlib.util
from typing import Any

import torch
from peft import LoraConfig, PeftMixedModel, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Mxfp4Config,
    PreTrainedModel,
    TorchAoConfig,
)

from hf_memopt.jobs.transformers_models.hub_code import check_model
from hf_memopt.recipes.common.flags import explained
from hf_memopt.recipes.sft.options import SftOptions


def load_model(options: SftOptions) -> PreTrainedModel:
    dtype = getattr(torch, options.dtype)
    attention = None if options.attention == "auto" else options.attention
    quantization = _quantization(options.quantize, dtype)
    with explained(f"model={options.model!r} cannot be loaded; pass a hub id or folder of a causal LM"):
        check_model(str(options.model))
        quantization = quantization or dequantization(str(options.model))
        model = AutoModelForCausalLM.from_pretrained(
            options.model,
            dtype=dtype,
            quantization_config=quantization,
            attn_implementation=attention,
            trust_remote_code=False,
        )
    model.config.use_cache = False
    return model


def dequantization(model: str) -> Any:
    """Return the way to load a checkpoint in MXFP4, which transformers does not train; None for others."""
    published = getattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "quantization_config", None) or {}
    return Mxfp4Config(dequantize=True) if published.get("quant_method") == "mxfp4" else None


def with_adapters(model: PreTrainedModel, options: SftOptions) -> PreTrainedModel | PeftModel | PeftMixedModel:
    """Return the model with adapters that learn in place of its own weights, if there shall be any."""
    if options.lora_rank is None:
        return model
    targets = options.lora_targets
    adapters = LoraConfig(
        r=options.lora_rank,
        lora_alpha=2 * options.lora_rank,
        target_modules=targets if targets == "all-linear" else targets.split(","),
        use_dora=options.use_dora,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, adapters)


def _quantization(how: str, dtype: torch.dtype) -> Any:
    if how == "none":
        return None
    library = "torchao" if how == "int8" else "bitsandbytes"
    if importlib.util.find_spec(library) is None:
        raise ValueError(f"quantize={how!r} needs {library}: pip install {library}")
    if how == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if how == "llm-int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=how == "nf4-double",
        bnb_4bit_quant_storage=dtype,  # the same bits, in a form that FSDP2 and ZeRO-3 divide
    )
