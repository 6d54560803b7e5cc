import pytest
import torch
from teacher_toys import Network
from torch import Tensor


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    network = Network().eval()
    network.norm.running_mean.normal_()
    return network


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
