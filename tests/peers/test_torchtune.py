"""Tests after torchtune's: its activation offloading (tests/torchtune/training/test_activation_offloading.py).

The ideas are Meta's, licensed under BSD-3; the code is our own. In most tests backward returns a view of a saved tensor
as a gradient, while the tensor's memory may be reused.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients import equal, take_gradients
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from hf_memopt import ActivationOffloader

pytestmark = pytest.mark.sweep(share=1 / 4)

NUM_STEPS = 4  # of which mode "auto" records two


def test_a_stack_of_linear_layers_has_the_plain_gradients(offloader: ActivationOffloader) -> None:
    torch.manual_seed(2024)
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(3)), nn.ReLU())
    x = torch.randn(2, 10)
    model(x).sum().backward()
    want = take_gradients(model)
    for _ in range(NUM_STEPS):
        with offloader.offload_context(model):
            loss = model(x).sum()
        loss.backward()
        assert equal(take_gradients(model), want)


def node(forward: Callable[[Any, Tensor], Tensor], backward: Callable[[Any, Tensor], Tensor]) -> Any:
    """Return the `apply` of a custom function."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Node", (Function,), methods).apply


def saved(ctx: Any) -> Tensor:
    (tensor,) = ctx.saved_tensors
    return tensor


def gives_saved_view(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x.t())
    return x.new_zeros(2, 4)


def saves_itself(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return x.clone()


def saves_fives(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(torch.full_like(x, 5.0))
    return x.clone()


def copies(ctx: Any, x: Tensor) -> Tensor:
    return x.clone()


def reads_and_passes_on(ctx: Any, gradient: Tensor) -> Tensor:
    saved(ctx)
    return gradient


def expects_ones(ctx: Any, gradient: Tensor) -> Tensor:
    assert gradient.eq(1).all()
    return saved(ctx)


def test_a_gradient_may_be_a_view_of_a_saved_tensor(offloader: ActivationOffloader) -> None:
    """Check a gradient that lives on after its node, while other saved tensors come back."""
    last = node(gives_saved_view, lambda ctx, gradient: saved(ctx).t())
    third = node(saves_itself, reads_and_passes_on)
    second = node(copies, lambda ctx, gradient: gradient.eq(1).float())
    first = node(saves_fives, expects_ones)
    leaf = torch.ones(256, 64, requires_grad=True)
    for _ in range(NUM_STEPS):
        with offloader.offload_context():
            loss = last(third(second(first(leaf)))).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(gradient, torch.full_like(leaf, 5.0))


def saves_a_view_of_a_view(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x.t().t())
    return x.clone()


def saves_noise(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(torch.rand_like(x))
    return x.clone()


def test_a_checkpointed_region_hands_a_gradient_to_what_was_offloaded(offloader: ActivationOffloader) -> None:
    """Check a region whose recomputation reuses memory while a gradient still views a saved tensor."""
    first = node(saves_fives, expects_ones)
    second = node(saves_itself, lambda ctx, gradient: gradient * saved(ctx).eq(1))
    third = node(saves_a_view_of_a_view, lambda ctx, gradient: saved(ctx).eq(1).float())
    noisy = node(saves_noise, lambda ctx, gradient: saved(ctx) + gradient)
    leaf = torch.ones(256, 64, requires_grad=True)
    for _ in range(NUM_STEPS):
        with offloader.offload_context():
            x = second(first(leaf))
            loss = checkpoint(lambda x: noisy(noisy(third(x))), x, use_reentrant=False).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(gradient, torch.full_like(leaf, 5.0))


@pytest.mark.parametrize("keep", [False, True])
def test_a_saved_tensor_may_outlive_its_node(offloader: ActivationOffloader, keep: bool) -> None:
    """Check that a tensor kept by backward keeps its bytes while others come back. torchtune has no such test."""
    put_away: list[Tensor] = []

    def puts_away(ctx: Any, gradient: Tensor) -> Tensor:
        put_away.append(saved(ctx)[1:] if keep else saved(ctx)[1:].clone())
        return gradient * saved(ctx)

    multiply = node(saves_itself, puts_away)
    for step in range(NUM_STEPS):
        leaf = torch.full((16, 16), step + 1.0, requires_grad=True)
        with offloader.offload_context():
            y = leaf
            for _ in range(5):
                y = multiply(y) + 1
        y.sum().backward()
        values = [tensor.unique().tolist() for tensor in put_away]
        assert values == [[step + 1.0 + depth] for depth in reversed(range(5))]
        put_away.clear()
