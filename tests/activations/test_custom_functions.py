"""Tests of custom functions that write to saved tensors, uncounted by autograd: `.data` stands in for fused kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_plain import MODES, Context, assert_as_plain, results
from as_plain import plain as plain_context
from torch import Tensor, nn

WIDTH, BATCH = 8, 6


class FreshSilu(torch.autograd.Function):
    """A SiLU that never writes to its saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return nn.functional.silu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.sigmoid() * (1 + x * (1 - x.sigmoid()))


class SiluOverwritingBackward(FreshSilu):
    """A SiLU that overwrites its input with the gradient by an operation that autograd counts."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.copy_(FreshSilu.backward(ctx, gradient))


class SiluOfAKernel(FreshSilu):
    """A SiLU that overwrites its input with the gradient, unseen by autograd."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        x.data.copy_(FreshSilu.backward(ctx, gradient))
        return x


class SiluOfAnAttribute(torch.autograd.Function):
    """A SiLU that keeps its input as an attribute, and overwrites the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.detach()
        return nn.functional.silu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x = ctx.x
        x.data.copy_(gradient * x.sigmoid() * (1 + x * (1 - x.sigmoid())))
        return x


class LossOfAKernel(torch.autograd.Function):
    """A loss that overwrites its input with the gradient in forward, and saves it, as fused cross entropies do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        loss = x.square().mean()
        x.data.copy_(2 * x / x.numel())
        ctx.save_for_backward(x.detach())
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x * gradient


SILUS = (FreshSilu, SiluOverwritingBackward, SiluOfAKernel, SiluOfAnAttribute)


class Net(nn.Module):
    """A network whose custom function comes last in forward, and so first in backward."""

    def __init__(self, function: Callable[[Tensor], Tensor], others: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self._function, self._others = function, others

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(batch)
        others = self._others(x) * self.scale
        return self.last(others + self._function(x)).square().mean()


def step(model: nn.Module, context: Context, number: int) -> Tensor:
    with context(model):
        loss = model(torch.randn(BATCH, WIDTH))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", SILUS)
def test_a_saved_tensor_is_not_computed_from_what_a_function_overwrites(function: Any, mode: str) -> None:
    """Check a function that alone saves its input, from which another node's tensor could be recomputed."""
    assert_as_plain(step, Net(function.apply, torch.tanh), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", SILUS)
def test_nor_by_way_of_others(function: Any, mode: str) -> None:
    assert_as_plain(step, Net(function.apply, lambda x: torch.tanh(2 * x.exp().clamp(max=3))), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", [SiluOverwritingBackward, FreshSilu])
def test_what_another_node_has_saved_may_not_be_overwritten(function: Any, mode: str) -> None:
    """Check the result of `exp`, which the function overwrites before the backward of `exp`."""
    net = Net(lambda x: function.apply(x.exp()), torch.tanh)
    want = results(step, net, plain_context)
    assert (want == ["modified"]) == (function is SiluOverwritingBackward)
    assert_as_plain(step, net, mode)


@pytest.mark.parametrize("mode", MODES)
def test_both_inputs_of_one_function(mode: str) -> None:
    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return nn.functional.silu(a) * b

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            s = a.sigmoid()
            of_a, of_b = gradient * b * s * (1 + a * (1 - s)), gradient * a * s
            a.data.copy_(of_a)
            b.data.copy_(of_b)
            return a, b

    assert_as_plain(step, Net(lambda x: Gate.apply(2 * x, 3 * x), torch.sigmoid), mode)
    assert_as_plain(step, Net(lambda x: Gate.apply(*torch.cat([x, x], 1).chunk(2, 1)), torch.sigmoid), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("others", [torch.tanh, lambda x: torch.tanh(x.exp())])
def test_what_a_function_overwrites_in_forward_is_saved_as_it_is_then(others: Any, mode: str) -> None:
    class Last(Net):
        def forward(self, batch: Tensor) -> Tensor:
            logits = nn.functional.linear(self.first(batch), self.first.weight)
            others = (self._others(logits) * self.scale).mean()
            return LossOfAKernel.apply(logits) + others

    assert_as_plain(step, Last(torch.relu, others), mode)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_dropped_graph_has_saved_is_not_taken_for_it(mode: str) -> None:
    """Check logits saved by a metric with an unused graph before the function overwrites the logits."""

    class Last(Net):
        def forward(self, batch: Tensor) -> Tensor:
            logits = self.first(batch)
            self.metric = logits.sin().mean()
            return LossOfAKernel.apply(logits)

    assert_as_plain(step, Last(torch.relu, torch.relu), mode)


@pytest.mark.parametrize("mode", MODES)
def test_computing_again_still_happens(mode: str) -> None:
    """Check that tensors that no function overwrites are still recomputed."""
    offloader = assert_as_plain(step, Net(lambda x: nn.functional.silu(x), lambda x: torch.tanh(x.exp())), mode)
    assert (offloader.stats.bytes_recomputed > 0) == (mode in ("recompute", "even", "odd", "random"))
