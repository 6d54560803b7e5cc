"""Tests of GradientCache on a device without room for the activations of the whole batch."""

import gc

import pytest
import torch
from accelerate import Accelerator
from nearly_full import nearly_full
from torch import Tensor, nn

from hf_memopt import ActivationOffloader
from hf_memopt.training import GradientCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 2**20
NUM_SAMPLES, WIDTH, NUM_LAYERS = 6144, 256, 5
ROOM = 48 * MIB  # each layer saves 12 MiB of the whole batch
TOLERANCE = 1e-12  # fp64, relative to the largest: sums over samples are taken in another order


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4)).double().cuda()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(NUM_SAMPLES, WIDTH, dtype=torch.float64).cuda()


def sliced_wasserstein(output: Tensor) -> Tensor:
    """Return a distance that depends on the order of all samples."""
    target = torch.linspace(-1, 1, len(output), dtype=output.dtype, device=output.device)[:, None]
    return (output.sort(0).values - target).square().mean()


def take_gradient(model: nn.Module) -> Tensor:
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    return gradient.cpu()


@pytest.mark.parametrize("offloads", [False, True])
def test_the_whole_batchs_gradient_fits(model: nn.Module, x: Tensor, offloads: bool) -> None:
    sliced_wasserstein(model(x)).backward()  # with room for all activations, and for the libraries' workspaces
    want = take_gradient(model)
    offloader = ActivationOffloader(enabled=offloads, mode="all", offload_threshold_mb=0.1)
    cache = GradientCache(Accelerator(), model, sliced_wasserstein)
    with nearly_full(ROOM):
        with pytest.raises(torch.OutOfMemoryError):
            sliced_wasserstein(model(x)).backward()
        gc.collect()  # the exception held the graph
        torch.cuda.empty_cache()
        model.zero_grad()
        with offloader.offload_context(model):
            cache.backward(x.split(256))
        got = take_gradient(model)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
