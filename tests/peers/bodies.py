"""Runs of small functions with and without an offloader, and common functions of autograd."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from hf_memopt import ActivationOffloader

NUM_STEPS = 4  # of which mode "auto" records two
MODIFIED = "one of the variables needed for gradient computation has been modified by an inplace operation"
FREED = "Trying to backward through the graph a second time"

Body = Callable[[], list[Tensor]]


def check(offloader: ActivationOffloader, body: Body) -> None:
    """Check that `body` returns the same gradients in the context as outside of it."""
    torch.manual_seed(0)
    want = body()
    assert want
    for _ in range(NUM_STEPS):
        torch.manual_seed(0)
        with offloader.offload_context():
            got = body()
        assert len(got) == len(want)
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    del got
    gc.collect()
    assert offloader.stats.host_bytes_live == 0


def check_raises(offloader: ActivationOffloader, body: Callable[[], Any], message: str = MODIFIED) -> None:
    """Check that `body` raises in the context with the same message as in plain autograd."""
    with pytest.raises(RuntimeError, match=message):
        body()
    for _ in range(NUM_STEPS):
        with pytest.raises(RuntimeError, match=message), offloader.offload_context():
            body()
    gc.collect()
    assert offloader.stats.host_bytes_live == 0


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, requires_grad=True)


def gradients(output: Tensor, *inputs: Tensor, **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(output.sum(), inputs, **options))


class Cube(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class DoubleInPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient
