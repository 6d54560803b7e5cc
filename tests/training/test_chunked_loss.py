"""A loss in chunks: the same value and gradient as at once, with one chunk's activations alive at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_memopt.memory import SavedBytes
from hf_memopt.training.loss_terms import chunked_loss


class Features(nn.Module):
    """A frozen network that compares features, as LPIPS does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, 1, 1))
        self.requires_grad_(False)
        self.batch_sizes: list[int] = []

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.batch_sizes.append(len(output))
        return (self.layers(output) - self.layers(target)).square().mean((1, 2, 3))


def make_pair(batch_size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch_size)
    output, target = (torch.randn(batch_size, 3, 6, 6, generator=generator, dtype=dtype) for _ in range(2))
    return output.requires_grad_(), target


@settings(max_examples=25, deadline=None)
@given(batch_size=st.integers(1, 7), chunk_size=st.integers(1, 8), factor=st.floats(0.1, 3))
def test_value_and_gradient_are_those_of_the_whole_batch(batch_size: int, chunk_size: int, factor: float) -> None:
    """Up to rounding, to which float64 leaves little room."""
    loss, (output, target) = Features().double(), make_pair(batch_size)
    whole = loss(output, target).mean()
    (expected,) = torch.autograd.grad(whole * factor, output)
    ours = chunked_loss(loss, output * 1, target, chunk_size=chunk_size)
    (found,) = torch.autograd.grad(ours * factor, output)
    torch.testing.assert_close(ours, whole, rtol=1e-13, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-16)


def test_one_chunk_of_everything_is_bitwise_the_same() -> None:
    loss, (output, target) = Features(), make_pair(4, torch.float32)
    whole = loss(output, target).mean()
    (expected,) = torch.autograd.grad(whole, output)
    ours = chunked_loss(loss, output, target, chunk_size=4)
    assert torch.equal(ours, whole)
    assert torch.equal(*torch.autograd.grad(ours, output), expected)


def test_the_graph_keeps_the_gradient_and_nothing_else() -> None:
    loss, (output, target) = Features(), make_pair(4, torch.float32)
    with SavedBytes() as saved:
        chunked_loss(loss, output, target)
    assert saved.total_bytes == output.nbytes
    with SavedBytes() as saved:
        loss(output, target).mean()
    assert saved.total_bytes > 2 * output.nbytes
    assert loss.batch_sizes == [1, 1, 1, 1, 4]


def test_hooks_outside_do_not_see_what_is_used_at_once() -> None:
    loss, (output, target) = Features(), make_pair(2, torch.float32)
    seen: list[torch.Size] = []
    with saved_tensors_hooks(lambda tensor: seen.append(tensor.shape) or tensor, lambda tensor: tensor):
        chunked_loss(loss, output, target).backward()
    assert seen == [output.shape]


def test_without_gradients_it_is_a_mean() -> None:
    loss, (output, target) = Features(), make_pair(3)
    loss.double()
    with torch.no_grad():
        found = chunked_loss(loss, output, target)
    assert not found.requires_grad
    assert not chunked_loss(loss, output.detach(), target).requires_grad
    torch.testing.assert_close(found, loss(output, target).mean().detach())


def test_a_second_derivative_is_refused() -> None:
    loss, (output, target) = Features().double(), make_pair(2)
    (first,) = torch.autograd.grad(chunked_loss(loss, output * 1, target).square(), output, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_bad_input_is_refused_with_a_remedy() -> None:
    loss, (output, target) = Features().double(), make_pair(2)
    with pytest.raises(ValueError, match="chunk_size=0 must be at least 1"):
        chunked_loss(loss, output, target, chunk_size=0)
    with pytest.raises(ValueError, match=r"targets\[0\] requires a gradient and would get none; detach it"):
        chunked_loss(loss, output, target.requires_grad_())
    with pytest.raises(ValueError, match=r"targets\[0\] has 1 samples, and output has 2"):
        chunked_loss(loss, output, target.detach()[:1])
    with pytest.raises(ValueError, match=r"trainable parameters, which would get no gradient; call requires_grad_"):
        chunked_loss(loss.requires_grad_(), output, target.detach())
