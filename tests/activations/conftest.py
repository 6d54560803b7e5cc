"""A small decoder, and offloaders with every copier that move all its saved tensors."""

from collections.abc import Callable

import pytest
import torch
import transformers
from adversarial_copier import COPIERS
from torch import Tensor, nn

from hf_memopt import ActivationOffloader
from hf_memopt.transfer import Copier

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}


@pytest.fixture(params=COPIERS)
def copier(request: pytest.FixtureRequest) -> Copier:
    return COPIERS[request.param]()


@pytest.fixture
def make(copier: Copier) -> Callable[..., ActivationOffloader]:
    return lambda **options: ActivationOffloader(
        **{"offload_threshold_mb": 0, "mode": "all", "copier": copier, **options}
    )


@pytest.fixture
def decoder() -> nn.Module:
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL)).train()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
