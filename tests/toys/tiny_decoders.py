"""A tiny Qwen3 and tokens, the same at each call."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}


def tiny_decoder(**settings: Any) -> nn.Module:
    """Return a model in training mode; `settings` go to its configuration."""
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE | settings)).train()


def some_tokens() -> Tensor:
    """Return `(2, 16)` tokens."""
    return torch.randint(0, SHAPE["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(1))
