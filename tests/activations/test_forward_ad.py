"""Tests that losses on directional derivatives, by forward-mode AD in a context, are bitwise the plain losses."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from as_plain import MODES, Context, assert_as_plain
from torch import Tensor, nn

# torch's own warning at the first use of its formulas.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")

SHAPE = 6, 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.LayerNorm(12), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 8))


def dual_level(net: nn.Module, context: Context, number: int) -> Tensor:
    x = torch.randn(SHAPE)
    with context(net), forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(net(forward_ad.make_dual(x, x.cos())))
        loss = tangent.square().mean() + primal.mean()
        loss.backward()
    return loss.detach()


def tangent_alone(net: nn.Module, context: Context, number: int) -> Tensor:
    x = torch.randn(SHAPE)
    with context(net), forward_ad.dual_level():
        loss = forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x)))).tangent.square().mean()
    loss.backward()
    return loss.detach()


def mean_flow(net: nn.Module, context: Context, number: int) -> Tensor:
    """Take a step as in MeanFlow and sCM, whose target is the network's own derivative along its path."""
    z, velocity = torch.randn(SHAPE), torch.randn(SHAPE)
    time = torch.rand(SHAPE[0], 1)

    def field(z: Tensor, time: Tensor) -> Tensor:
        return net(z + time)

    with context(net):
        u, derivative = torch.func.jvp(field, (z, time), (velocity, torch.ones_like(time)))
        loss = (u - (velocity - time * derivative).detach()).square().mean() + derivative.square().mean()
    loss.backward()
    return loss.detach()


def constant_tangent(net: nn.Module, context: Context, number: int) -> Tensor:
    """Take a step with one input without a tangent, for which autograd saves zeros without memory."""
    x, y = torch.randn(SHAPE), torch.randn(SHAPE, requires_grad=True)
    with context(net), forward_ad.dual_level():
        product = net(forward_ad.make_dual(x, x.sin())) * (y * 2) * net(y)
        loss = forward_ad.unpack_dual(product).tangent.square().mean()
    loss.backward()
    assert y.grad is not None
    return y.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", [dual_level, tangent_alone, mean_flow, constant_tangent])
@pytest.mark.parametrize("copier", ["sync", "random"])
@pytest.mark.sweep(share=0.15)
def test_gradients_of_directional_derivatives(step: object, mode: str, copier: str) -> None:
    assert_as_plain(step, model(), mode, copier)
