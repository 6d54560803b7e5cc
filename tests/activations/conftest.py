"""A small decoder, and offloaders with every copier that move all its saved tensors."""

from collections.abc import Callable

import pytest
from adversarial_copier import COPIERS
from tiny_decoders import some_tokens, tiny_decoder
from torch import Tensor, nn

from hf_memopt import ActivationOffloader
from hf_memopt.transfer import Copier


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
    return tiny_decoder()


@pytest.fixture
def tokens() -> Tensor:
    return some_tokens()
