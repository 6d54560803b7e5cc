"""Tests of solvers that write their stages to one storage through `.data`: bitwise the plain gradients."""

import warnings

import pytest
import torch
from as_plain import MODES, Context, assert_as_plain
from torch import Tensor, nn

torchdiffeq = pytest.importorskip("torchdiffeq")

ADAPTIVE = ("dopri8", "dopri5", "bosh3", "fehlberg2", "adaptive_heun")
FIXED = ("euler", "midpoint", "heun2", "heun3", "rk4", "explicit_adams", "implicit_adams")
TIMES = torch.linspace(0, 1, 3)


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y) * torch.cos(t)


def solve(solver: str, method: str) -> Tensor:
    def step(field: nn.Module, context: Context, number: int) -> Tensor:
        x = torch.randn(4, 6)
        with context(field), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # implicit_adams does not always converge
            y = getattr(torchdiffeq, solver)(field, x, TIMES, method=method, rtol=1e-2, atol=1e-2)
            loss = (y[-1] - x.flip(1)).square().mean()
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ADAPTIVE)
@pytest.mark.sweep(share=0.15)
def test_adaptive_solvers(method: str, mode: str) -> None:
    assert_as_plain(solve("odeint", method), Field(), mode)


@pytest.mark.sweep(share=1 / 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", FIXED)
def test_fixed_grids(method: str, mode: str) -> None:
    assert_as_plain(solve("odeint", method), Field(), mode)


@pytest.mark.sweep(share=1 / 10)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", [*ADAPTIVE, *FIXED])
def test_adjoints(method: str, mode: str) -> None:
    assert_as_plain(solve("odeint_adjoint", method), Field(), mode)
