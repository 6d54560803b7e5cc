"""The model that `train_sft.py` fine-tunes: full weights, or a frozen base, quantised or not, with adapters."""

import importlib.util
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config, PreTrainedModel, TorchAoConfig
from trl import get_quantization_config

from hf_memopt.planning.models.adapters import freeze_first_layers
from hf_memopt.planning.models.hub_code import check_model
from hf_memopt.recipes.common.flags import explained
from hf_memopt.recipes.sft.options import Options


def load_model(options: Options) -> PreTrainedModel:
    about = options.model
    quantization = _quantization(options)
    with explained(f"model={about.model_name_or_path!r} cannot be loaded; pass a hub id or folder of a causal LM"):
        check_model(str(about.model_name_or_path))
        quantization = quantization or dequantization(str(about.model_name_or_path))
        model = AutoModelForCausalLM.from_pretrained(
            about.model_name_or_path,
            dtype=about.dtype if about.dtype in ("auto", None) else getattr(torch, about.dtype),
            quantization_config=quantization,
            attn_implementation=about.attn_implementation,
            trust_remote_code=False,
        )
    model.config.use_cache = False
    if options.sft.freeze_layers is not None:
        freeze_first_layers(model, options.sft.freeze_layers)
    return model


def dequantization(model: str) -> Any:
    """Return the way to load a checkpoint in MXFP4, which transformers does not train; None for others."""
    published = getattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "quantization_config", None) or {}
    return Mxfp4Config(dequantize=True) if published.get("quant_method") == "mxfp4" else None


def _quantization(options: Options) -> Any:
    if not options.is_quantised:
        return None
    library = "torchao" if options.sft.quantize else "bitsandbytes"
    if importlib.util.find_spec(library) is None:
        raise ValueError(f"weights in few bits by {library} need it: pip install {library}")
    if options.sft.quantize:
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    about = options.model
    # The same bits, in a form that FSDP2 and ZeRO-3 divide.
    return get_quantization_config(replace(about, bnb_4bit_quant_storage=about.bnb_4bit_quant_storage or about.dtype))
