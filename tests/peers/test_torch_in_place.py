"""Tests after PyTorch's test/test_autograd.py: in-place modification and version counters.

The ideas are the PyTorch contributors', licensed under BSD-3; the code is our own. Instead of PyTorch's hooks, the
tests check gradients and the bytes left on the host.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bodies import MODIFIED, NUM_STEPS, Body, Cube, DoubleInPlace, check, check_raises, gradients, leaf
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from hf_memopt import ActivationOffloader

pytestmark = pytest.mark.sweep(share=1 / 4)


def saved_result() -> None:
    x = leaf(5, 5)
    y = x.exp()
    y.mul_(2)
    y.sum().backward()


def saved_operand() -> None:
    x, w = leaf(5, 5), leaf(5, 5)
    y = x * 2
    z = y * w
    y.add_(1)
    z.sum().backward()


def saved_leaf() -> None:
    x = leaf(5, 5)
    y = x * x
    with torch.no_grad():
        x.add_(1)
    y.sum().backward()


def through_a_view() -> None:
    x = leaf(5, 5)
    y = x * 2
    z = y.sin()
    y[0].zero_()
    z.sum().backward()


def a_saved_view_through_its_base() -> None:
    x = leaf(5, 5)
    y = x * 2
    z = y[1:].t().sin()
    y.mul_(2)
    z.sum().backward()


def through_a_detached_alias() -> None:
    x = leaf(5, 5)
    y = x * 2
    z = y.sin()
    y.detach().zero_()
    z.sum().backward()


def between_two_uses() -> None:
    x = leaf(5, 5)
    y = x * 2
    first = y.sin()
    y.mul_(3)
    second = y.sin()
    (first + second).sum().backward()


def what_a_function_saved() -> None:
    x = leaf(5, 5)
    y = x * 2
    z = Cube.apply(y)
    y.zero_()
    z.sum().backward()


def marked_dirty() -> None:
    x = leaf(5, 5)
    y = x * 2
    z = y.sin()
    DoubleInPlace.apply(y)
    z.sum().backward()


def between_two_backwards() -> None:
    x, w = leaf(5, 5), leaf(5, 5)
    y = x * 2
    z = (y * w).sum()
    z.backward(retain_graph=True)
    with torch.no_grad():
        w.add_(1)
    z.backward()


@pytest.mark.parametrize(
    "body",
    [
        saved_result, saved_operand, saved_leaf, through_a_view, a_saved_view_through_its_base,
        through_a_detached_alias, between_two_uses, what_a_function_saved, marked_dirty, between_two_backwards,
    ],
)  # fmt: skip
def test_modification_is_refused_in_autograds_words(offloader: ActivationOffloader, body: Callable[[], None]) -> None:
    check_raises(offloader, body)


def test_double_backward_does_not_read_what_was_modified(offloader: ActivationOffloader) -> None:
    """Check for the right result from a copy, or for autograd's error without a copy."""
    x = leaf(5, 5)
    for _ in range(NUM_STEPS):
        with offloader.offload_context():
            y = x * 1
            cube = (y**3).sum()
        (slope,) = torch.autograd.grad(cube, y, create_graph=True)
        with torch.no_grad():
            y.add_(1)
        try:
            (curvature,) = gradients(slope, x)
        except RuntimeError as error:
            if MODIFIED not in str(error):
                raise
        else:
            assert torch.equal(curvature, 6 * x.detach())


def what_nobody_saved() -> list[Tensor]:
    x = leaf(5, 5)
    y = x + 1
    y.mul_(2).sub_(1)
    return gradients(y.sin(), x)


def after_backward() -> list[Tensor]:
    x = leaf(5, 5)
    y = x * 2
    first = gradients(y.sin(), x, retain_graph=True)
    y.zero_()
    return first + gradients(y.cos(), x)


def in_place_and_saved_after_it() -> list[Tensor]:
    x = leaf(5, 5)
    y = x * 2
    y.mul_(3).sigmoid_()
    return gradients(y.sin() * y, x)


def rows_of_a_buffer() -> list[Tensor]:
    x, buffer = leaf(6, 4), torch.zeros(6, 4)
    for index, row in enumerate(x):
        buffer[index] = row * 2
    return gradients(buffer.sin() * buffer, x)


def a_view_of_a_view() -> list[Tensor]:
    x = leaf(4, 6)
    y = x * 2
    part = y[1:].view(3, 2, 3)[:, 1]
    part.mul_(5)
    z = y.exp()
    part.detach().add_(0)  # counts as a write, but the result is saved, not the input
    return gradients(z, x)


def a_base_with_two_views() -> list[Tensor]:
    x = leaf(4, 6)
    y = x * 1
    first, second = y[:2], y[2:]
    first.add_(second)
    return gradients((y * first.sum()).sin(), x)


def the_same_memory_in_turn() -> list[Tensor]:
    x, memory = leaf(5), torch.zeros(5)
    total: Any = 0
    for value in range(3):
        memory = memory.fill_(value) if value == 0 else memory + 1
        total = total + x * memory
    return gradients(total, x)


def saved_once_and_again_after_a_write() -> list[Tensor]:
    """Return gradients after a write between two graphs, the first of which is dropped and no longer objects."""
    x, y = leaf(5, 5), torch.ones(5, 5)
    unused = (x * y).sum()
    y.mul_(3)
    del unused
    return gradients(x * y, x)


def hidden_writes() -> list[Tensor]:
    """Return gradients after a write through `.data`: the newer graph reads the newer bytes, the older is unused."""
    x = leaf(32, 32)
    unused = (x * x).sum()
    for _ in range(4):  # moves the saved tensors out of the window of copies under way
        (leaf(64, 64) * 2).exp()
    x.data.add_(1)
    return [*gradients(x * x, x), unused.detach()]


@pytest.mark.parametrize(
    "body",
    [
        what_nobody_saved, after_backward, in_place_and_saved_after_it, rows_of_a_buffer, a_view_of_a_view,
        a_base_with_two_views, the_same_memory_in_turn, saved_once_and_again_after_a_write, hidden_writes,
    ],
)  # fmt: skip
def test_allowed_modification(offloader: ActivationOffloader, body: Body) -> None:
    check(offloader, body)


@pytest.mark.parametrize("check_of", [gradcheck, gradgradcheck])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.tanh() * x, lambda x: x**2 / (x.exp() + 1), lambda x: (x @ x.T).softmax(-1),
        lambda x: torch.fft.rfft(x).abs(), lambda x: Cube.apply(x).sum(0), lambda x: x.clone().mul_(2).sin_(),
    ],
)  # fmt: skip
@pytest.mark.sweep(share=0.15)
def test_gradcheck(offloader: ActivationOffloader, check_of: Callable[..., bool], function: Any) -> None:
    """Run gradcheck, which writes its input past the version counter between passes whose graphs are alive."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(NUM_STEPS):
        with offloader.offload_context():
            assert check_of(function, x)
