"""The model of `train_causal_lm.py`, as its flags describe it."""

import json
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_memopt.planning.models.hub_code import check_code, check_model
from hf_memopt.planning.models.model_config import check_sizes
from hf_memopt.planning.models.quiet import building
from hf_memopt.planning.models.tasks import checkpoint_layers
from hf_memopt.recipes.causal_lm.options import ModelOptions
from hf_memopt.recipes.common.flags import explained


def make_model(options: ModelOptions, tokenizer: PreTrainedTokenizerBase, block_size: int) -> PreTrainedModel:
    """Return a pretrained model, or one from scratch whose weights torch's seed decides."""
    dtype = getattr(torch, options.dtype)
    if options.model is None:
        config = _new_config(options, tokenizer)
        with building(f"config_overrides={options.config_overrides!r}"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    else:
        with explained(f"model={options.model!r} cannot be loaded; pass a hub id or folder of a causal LM"):
            check_model(options.model)
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, trust_remote_code=False)
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and block_size > longest:
        raise ValueError(f"block_size={block_size} is longer than the model's max_position_embeddings={longest}")
    model.config.use_cache = False
    if options.gradient_checkpointing:
        checkpoint_layers(model)
    return model


def _new_config(options: ModelOptions, tokenizer: PreTrainedTokenizerBase) -> Any:
    overrides = _overrides(options.config_overrides)
    if options.model_type not in CONFIG_MAPPING:
        raise ValueError(f"model_type={options.model_type!r} is unknown to transformers; use qwen3, for example")
    known = AutoConfig.for_model(options.model_type)
    for name in overrides:
        if not hasattr(known, name):
            raise ValueError(
                f"config_overrides={options.config_overrides!r}: {options.model_type} has no setting {name!r}; see "
                f"transformers' {type(known).__name__}"
            )
    token = tokenizer.eos_token_id
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": token, "eos_token_id": token, "pad_token_id": token}
    source = f"config_overrides={options.config_overrides!r}"
    with building(source):
        config = AutoConfig.for_model(options.model_type, **{**tokens, **overrides})
    check_code(config, source)
    check_sizes(vars(config), source)
    return config


def _overrides(text: str) -> dict[str, Any]:
    """Read `a=1,b=true,c=silu`, with values as in JSON, and words as strings."""
    overrides = {}
    for setting in filter(None, text.split(",")):
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"config_overrides={text!r}: {setting!r} is not of the form name=value")
        try:
            overrides[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            overrides[name.strip()] = value
    return overrides
