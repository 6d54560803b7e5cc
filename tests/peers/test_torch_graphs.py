"""Tests after PyTorch's test/test_autograd.py: saved tensors, custom functions, retained graphs and checkpoints.

The ideas are the PyTorch contributors' and, where it is said, torchtune's (Meta), both licensed under BSD-3; the code
is our own. Instead of PyTorch's hooks, the tests check gradients and the bytes left on the host.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bodies import FREED, NUM_STEPS, Body, Cube, DoubleInPlace, check, check_raises, gradients, leaf
from gradients import equal, take_gradients
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hf_memopt import ActivationOffloader

pytestmark = pytest.mark.sweep(share=1 / 4)


class SaveResult(Function):
    """A function that saves an output, an input, None and a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        result = (x * scale).exp()
        ctx.scale = scale
        ctx.save_for_backward(result, None, x, torch.full_like(x, scale))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        result, nothing, x, scales = ctx.saved_tensors
        assert nothing is None
        assert scales.eq(ctx.scale).all()
        return gradient * result * scales + 0 * x, None


class SaveInSetup(Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y, x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
        x, y, product = ctx.saved_tensors
        return gradient * y + 0 * product, gradient * x


class BackwardInBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.inside = x.detach().requires_grad_()
            ctx.result = (ctx.inside * ctx.inside.exp()).sin()
        return ctx.result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.result.backward(gradient, retain_graph=True)
        return ctx.inside.grad


def a_function_twice() -> list[Tensor]:
    x = leaf(5, 5)
    y = Cube.apply(x)
    (slope,) = gradients(y, x, create_graph=True)
    return [slope, *gradients(slope.square(), x)]


def results_of_a_function() -> list[Tensor]:
    x = leaf(5, 5)
    return gradients(SaveResult.apply(SaveResult.apply(x * 1, 0.5), 0.1), x)


def a_function_with_setup() -> list[Tensor]:
    x, y = leaf(5, 5), leaf(5, 5)
    product, total = SaveInSetup.apply(x * 1, y.t())
    return gradients(product * total, x, y)


def a_dirty_function() -> list[Tensor]:
    x = leaf(5, 5)
    y = x * 1
    z = DoubleInPlace.apply(y[1:])
    return gradients(z.sin() * y.sum(), x)


def a_graph_in_a_node() -> list[Tensor]:
    x = leaf(5, 5)
    return gradients(BackwardInBackward.apply(x * 2).tanh(), x)


@pytest.mark.parametrize(
    "body", [a_function_twice, results_of_a_function, a_function_with_setup, a_dirty_function, a_graph_in_a_node]
)
def test_custom_functions(offloader: ActivationOffloader, body: Body) -> None:
    check(offloader, body)


@pytest.mark.parametrize("function", [lambda x: x.exp(), lambda x: x.square(), Cube.apply])
def test_a_freed_graph_is_said_to_be_freed(
    offloader: ActivationOffloader, function: Callable[[Tensor], Tensor]
) -> None:
    def twice() -> None:
        y = function(leaf(5, 5) * 1).sum()
        y.backward()
        y.backward()

    check_raises(offloader, twice, FREED)


def test_saved_tensors_can_be_looked_at(offloader: ActivationOffloader) -> None:
    for _ in range(NUM_STEPS):
        x = leaf(5, 5)
        with offloader.offload_context():
            y = x * 1
            z = y.square()
            cube = Cube.apply(y)
        for _ in range(2):
            assert torch.equal(z.grad_fn._saved_self, y)
            assert torch.equal(cube.grad_fn.saved_tensors[0], y)
        (slope,) = torch.autograd.grad((z + cube).sum(), y, retain_graph=True)
        assert torch.equal(slope, 2 * y + 3 * y**2)
        (z + cube).sum().backward()
        with pytest.raises(RuntimeError, match="after they have already been freed"):
            _ = z.grad_fn._saved_self
        assert torch.equal(x.grad, slope)


def test_what_a_step_leaves_unread_is_freed_with_it(offloader: ActivationOffloader) -> None:
    model = nn.Linear(5, 5)
    for _ in range(NUM_STEPS):
        with offloader.offload_context(model):
            nested = model(leaf(5, 5)).tanh()
            for _ in range(3):
                nested = nested.exp().sin()
        del nested
        assert offloader.stats.host_bytes_live == 0


def a_retained_graph() -> list[Tensor]:
    x, w = leaf(5, 5), leaf(5, 5)
    y = (x @ w).tanh() * x
    found = []
    for _ in range(3):
        found += gradients(y, x, w, retain_graph=True)
    return found + gradients(y, w)


def parts_of_a_graph() -> list[Tensor]:
    """Return gradients of backwards that each free their own part, the last of which frees the shared part."""
    x = leaf(5, 5)
    shared = (x * 2).exp()
    heads = [shared.sin(), shared.square(), shared.tanh()]
    found = [gradients(head, shared, retain_graph=True)[0] for head in heads]
    return found + [gradients(head, x, retain_graph=index < 2)[0] for index, head in enumerate(heads)]


def one_row_after_the_other() -> list[Tensor]:
    x, w = leaf(4), leaf(4, 4)
    y = (w @ x).exp()
    return [torch.autograd.grad(row, x, retain_graph=True)[0] for row in y]


def all_rows_at_once() -> list[Tensor]:
    x = leaf(4)
    y = x.exp() * x
    return list(torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True))


def a_hessian() -> list[Tensor]:
    x = leaf(4)
    (slope,) = torch.autograd.grad((x.sin() * x**2).sum(), x, create_graph=True)
    return [torch.autograd.grad(row, x, retain_graph=True)[0] for row in slope]


def third_order() -> list[Tensor]:
    x = leaf(5)
    y = x.sin() * x.exp()
    found = []
    for _ in range(3):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append(y.detach().clone())
    return found


def a_step_of_descent_inside() -> list[Tensor]:
    x, w = leaf(5, 5), leaf(5, 5)
    (step,) = torch.autograd.grad((x @ w).square().mean(), w, create_graph=True)
    return gradients((x @ (w - 0.1 * step)).tanh(), x, w)


def only_some_inputs() -> list[Tensor]:
    x, w, unused = leaf(5, 5), leaf(5, 5), leaf(5)
    y = (x @ w).exp()
    y.sum().backward(inputs=[w], retain_graph=True)
    (nothing,) = torch.autograd.grad(y.sum(), unused, allow_unused=True, retain_graph=True)
    assert nothing is None
    assert x.grad is None
    return [w.grad, *gradients(y, x)]


def hooks_that_change_gradients() -> list[Tensor]:
    x = leaf(5, 5)
    y = x * 2
    y.retain_grad()
    y.register_hook(lambda gradient: gradient * y.detach())
    y.exp().sum().backward()
    return [x.grad, y.grad]


def one_of_several_outputs() -> list[Tensor]:
    x = leaf(5, 5)
    largest, where = x.max(dim=0)
    left, right = torch.linalg.qr(x)
    values = (x * 1).sort().values
    return gradients(largest * left.sum() + values.cumsum(0).diagonal() + where + 0 * right, x)


def products() -> list[Tensor]:
    """Return gradients of products, which torch computes differently inside a dispatch mode, with other bits."""
    x = leaf(64)
    return gradients(x.abs().prod(), x) + gradients(x.cumprod(0), x)


@pytest.mark.parametrize(
    "body",
    [
        a_retained_graph, parts_of_a_graph, one_row_after_the_other, all_rows_at_once, a_hessian, third_order,
        a_step_of_descent_inside, only_some_inputs, hooks_that_change_gradients, one_of_several_outputs,
        products,
    ],
)  # fmt: skip
def test_several_backwards(offloader: ActivationOffloader, body: Body) -> None:
    check(offloader, body)


def test_backward_in_other_threads(offloader: ActivationOffloader) -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    layer(x).exp().sum().backward()
    want = take_gradients(layer)
    for _ in range(NUM_STEPS):
        with offloader.offload_context(layer):
            losses = [layer(x).exp().sum() for _ in range(3)]
        for loss in losses:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            assert equal(take_gradients(layer), want)


def region(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.dropout((x @ w).tanh(), 0.3) * x.exp()


def a_checkpoint() -> list[Tensor]:
    x, w = leaf(5, 5), leaf(5, 5)
    y = checkpoint(region, x * 2, w, use_reentrant=False)
    return gradients(y.sin(), x, w, retain_graph=True) + gradients(y, x)


def a_reentrant_checkpoint() -> list[Tensor]:
    x, w = leaf(5, 5), leaf(5, 5)
    checkpoint(region, x * 2, w, use_reentrant=True).sin().sum().backward()
    return [x.grad, w.grad]


def nested_checkpoints() -> list[Tensor]:
    x, w = leaf(5, 5), leaf(5, 5)

    def outer(x: Tensor) -> Tensor:
        return checkpoint(region, x.sin(), w, use_reentrant=False) + x.square()

    y = checkpoint(outer, checkpoint(outer, x * 2, use_reentrant=False), use_reentrant=False)
    return gradients(y.sin(), x, w)


def a_checkpoint_to_the_end() -> list[Tensor]:
    with set_checkpoint_early_stop(False):
        return a_checkpoint()


def a_checkpoint_with_double_backward() -> list[Tensor]:
    x, w = leaf(5, 5), leaf(5, 5)
    y = checkpoint(region, x * 2, w, use_reentrant=False)
    (slope,) = gradients(y, x, create_graph=True)
    return [slope, *gradients(slope.square(), x, w)]


def hooks_inside() -> list[Tensor]:
    """Return gradients with other hooks inside, of which the innermost run."""
    x, w = leaf(5, 5), leaf(5, 5)
    y = region(x, w).sin()
    with saved_tensors_hooks(lambda tensor: (tensor.clone(),), lambda packed: packed[0]):
        y = y.exp() * x
    with save_on_cpu():
        y = y.tanh() * w
    return gradients(y.cos(), x, w)


@pytest.mark.parametrize(
    "body",
    [
        a_checkpoint, a_reentrant_checkpoint, nested_checkpoints, a_checkpoint_to_the_end,
        a_checkpoint_with_double_backward, hooks_inside,
    ],
)  # fmt: skip
def test_checkpoints_and_hooks(offloader: ActivationOffloader, body: Body) -> None:
    check(offloader, body)


def node(forward: Callable[[Any, Tensor], Tensor], backward: Callable[[Any, Tensor], Tensor]) -> Any:
    """Return the `apply` of a custom function."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Node", (Function,), methods).apply


def saving(make: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Return the forward of a node that saves `make` of its input."""

    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(make(x))
        return x.clone()

    return forward


def saved(ctx: Any) -> Tensor:
    (tensor,) = ctx.saved_tensors
    return tensor


def passes_on(ctx: Any, gradient: Tensor) -> Tensor:
    saved(ctx)
    return gradient


def a_gradient_that_is_a_saved_view() -> list[Tensor]:
    """After torchtune: the gradient lives on after its node, while other saved tensors come back."""
    x = leaf(64, 16)
    last = node(saving(Tensor.t), lambda ctx, gradient: saved(ctx).t())
    third = node(saving(lambda x: x), passes_on)
    first = node(saving(lambda x: torch.full_like(x, 5.0)), lambda ctx, gradient: gradient * saved(ctx))
    return gradients(last(third(first(x))), x)


def a_gradient_out_of_a_checkpoint() -> list[Tensor]:
    """After torchtune: the region's recomputation reuses memory while its gradient is made of a saved tensor."""
    x = leaf(64, 16)
    first = node(saving(lambda x: torch.full_like(x, 5.0)), lambda ctx, gradient: gradient * saved(ctx))
    second = node(saving(lambda x: x), lambda ctx, gradient: gradient * saved(ctx))
    third = node(saving(lambda x: x.t().t()), lambda ctx, gradient: saved(ctx))
    noisy = node(saving(torch.rand_like), lambda ctx, gradient: saved(ctx) + gradient)
    return gradients(checkpoint(lambda x: noisy(noisy(third(x))), second(first(x)), use_reentrant=False), x)


def what_backward_puts_away() -> list[Tensor]:
    x = y = leaf(16, 16)
    put_away: list[Tensor] = []

    def puts_away(ctx: Any, gradient: Tensor) -> Tensor:
        put_away.append(saved(ctx)[1:])
        return gradient * saved(ctx)

    for _ in range(5):
        y = node(saving(lambda x: x), puts_away)(y) + 1
    return [*gradients(y, x), *put_away]


@pytest.mark.parametrize(
    "body", [a_gradient_that_is_a_saved_view, a_gradient_out_of_a_checkpoint, what_backward_puts_away]
)
def test_saved_tensors_that_outlive_their_nodes(offloader: ActivationOffloader, body: Body) -> None:
    check(offloader, body)
