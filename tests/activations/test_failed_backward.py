"""Tests that a backward that raises leaves no memory behind, and that the newest plan is still reported."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_memopt
from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.activations import InfeasibleBudgetError


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


def fail(offloader: ActivationOffloader) -> None:
    """Run a backward that raises, and leave nodes of another branch in the queue of torch's engine."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    x = torch.randn(4, 8)
    with offloader.offload_context():
        branch = second(second(x).tanh()).exp()
        loss = branch.mean() + Raises.apply(first(x).sin()).mean()
    with pytest.raises(ZeroDivisionError):
        loss.backward()


@pytest.mark.parametrize("mode", ["all", "auto"])
def test_no_host_memory_stays_held(mode: str) -> None:
    offloader = ActivationOffloader(mode=mode, offload_threshold_mb=0, copier=SyncCopier())
    fail(offloader)
    gc.collect()
    assert offloader.stats.host_bytes_live == 0


def test_the_next_pass_begins_without_it() -> None:
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier())
    fail(offloader)
    gc.collect()
    with offloader.offload_context():
        (device,) = (device for device in offloader._devices.values() if device is not None)
        assert device.bytes_live == 0


def test_the_newest_plan_is_reported_after_its_model_is_gone() -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0, copier=SyncCopier(), max_slowdown=1.0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    for _ in range(6):
        with offloader.offload_context(model):
            loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
    assert "saved by" in str(offloader.report())
    del model, loss
    gc.collect()
    assert "saved by" in str(offloader.report())


def test_the_error_of_a_budget_is_a_public_name() -> None:
    assert hf_memopt.InfeasibleBudgetError is InfeasibleBudgetError
