"""Tests that a chunked loss equals the whole batch's, and that R1 is right when it is offloaded and checkpointed."""

from collections.abc import Callable

import gradients
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from hf_memopt import ActivationOffloader, SyncCopier, apply_selective_checkpointing, detect_leaks
from hf_memopt.memory import SavedBytes
from hf_memopt.training.loss_terms import chunked_loss, r1_penalty

# ------------------------------------------------------------------------------------------------ a loss in chunks


class Features(nn.Module):
    """A loss of a frozen network's features, as LPIPS."""

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
    """Compare up to float64's rounding."""
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


def test_bad_input_of_a_chunked_loss_is_refused_with_a_remedy() -> None:
    loss, (output, target) = Features().double(), make_pair(2)
    with pytest.raises(ValueError, match=r"targets\[0\] requires a gradient and would get none; detach it"):
        chunked_loss(loss, output, target.requires_grad_())
    with pytest.raises(ValueError, match=r"targets\[0\] has 1 samples, and output has 2"):
        chunked_loss(loss, output, target.detach()[:1])
    with pytest.raises(ValueError, match=r"trainable parameters, which would get no gradient; call requires_grad_"):
        chunked_loss(loss.requires_grad_(), output, target.detach())


# ------------------------------------------------------------------------------------------------ R1


def make_discriminator(normalised: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, 1, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 4, 2, 1), nn.Tanh(), nn.Conv2d(8, 1, 3)]
    return nn.Sequential(*(spectral_norm(x) if normalised and isinstance(x, nn.Conv2d) else x for x in layers))


def make_images() -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def loss_of(discriminator: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    scores = discriminator(images)
    return torch.relu(1 - scores).mean() + 2.5 * r1_penalty(scores, images)


def test_of_a_linear_discriminator_r1_is_the_squared_norm_of_its_weights() -> None:
    weights = torch.randn(12, dtype=torch.float64, requires_grad=True)
    images = torch.randn(5, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    penalty = r1_penalty(images.flatten(1) @ weights, images)
    assert penalty.item() == pytest.approx(weights.square().sum().item(), rel=1e-12)
    penalty.backward()
    torch.testing.assert_close(weights.grad, 2 * weights.detach())


def test_logits_per_patch_count_by_their_mean() -> None:
    discriminator, images = make_discriminator(), make_images()
    scores = discriminator(images)
    assert scores.shape[2] > 1
    whole = r1_penalty(scores, images)
    assert torch.equal(whole, r1_penalty(scores.mean((1, 2, 3)), images))


def test_the_derivative_of_r1_is_that_of_finite_differences() -> None:
    discriminator = make_discriminator().double()
    images = make_images().double().detach().requires_grad_()
    weight = discriminator[0].weight
    (slope,) = torch.autograd.grad(r1_penalty(discriminator(images), images), weight)
    direction = torch.randn_like(slope)
    step = 1e-6

    def shifted(by: float) -> float:
        with torch.no_grad():
            weight.add_(by * direction)
        found = r1_penalty(discriminator(images), images).item()
        with torch.no_grad():
            weight.sub_(by * direction)
        return found

    numeric = (shifted(step) - shifted(-step)) / (2 * step)
    assert (slope * direction).sum().item() == pytest.approx(numeric, rel=1e-6)


@pytest.mark.parametrize("mode", ["all", "auto"])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.usefixtures("quick_plans")
def test_offloading_changes_no_bit_of_r1(mode: str, normalised: bool) -> None:
    """Take passes without R1 in between, also when "auto" follows a plan."""
    plain, offloaded = make_discriminator(normalised), make_discriminator(normalised)
    images = make_images()
    budget = {"budget_gib": 0.00012} if mode == "auto" else {}
    offloader = ActivationOffloader(mode=mode, offload_threshold_mb=0, copier=SyncCopier(), **budget)
    for number in range(6):
        found = []
        for discriminator in (plain, offloaded):
            with offloader.offload_context(offloaded) if discriminator is offloaded else torch.enable_grad():
                loss = loss_of(discriminator, images) if number % 2 else discriminator(images).mean()
            torch.autograd.backward(loss, inputs=list(discriminator.parameters()))
            found.append(gradients.take_gradients(discriminator))
            del loss
        assert gradients.equal(*found), number
    assert images.grad is None
    assert offloader.stats.bytes_moved > 0
    assert offloader.stats.host_bytes_live == 0


@pytest.mark.parametrize("how", ["torch", "selective"])
def test_checkpointing_changes_no_bit_of_r1(how: str) -> None:
    images, discriminator = make_images(), make_discriminator()
    loss_of(discriminator, images).backward()
    expected = gradients.take_gradients(discriminator)
    if how == "torch":
        run: Callable[[Tensor], Tensor] = lambda x: checkpoint(discriminator, x, use_reentrant=False)  # noqa: E731
    else:
        apply_selective_checkpointing(discriminator, "all", modules=["0", "2"])
        run = discriminator
    loss_of(run, images).backward()
    assert gradients.equal(gradients.take_gradients(discriminator), expected)


def test_a_normalised_discriminator_is_not_checkpointed() -> None:
    with pytest.raises(ValueError, match="writes the buffer '_u', and recomputation would write it once more"):
        apply_selective_checkpointing(make_discriminator(normalised=True), "all", modules=[nn.Conv2d, "0", "2"])


def test_half_precision_is_squared_in_float32() -> None:
    images = torch.full((1, 3), 1.0, dtype=torch.float16, requires_grad=True)
    penalty = r1_penalty((images * 300).sum(1), images)
    assert penalty.dtype == torch.float32
    assert penalty.item() == 3 * 300**2  # more than the largest float16


@pytest.mark.parametrize(
    ("scores", "images", "message"),
    [
        (torch.ones(2, requires_grad=True), torch.ones(2, 3), r"requires no gradient; call images.requires_grad_\(\)"),
        (torch.ones(2), torch.ones(2, 3, requires_grad=True), "scores has no graph; call the discriminator with"),
        (torch.ones(3, requires_grad=True), torch.ones(2, 3, requires_grad=True), r"scores of shape \(3,\) are not"),
        (torch.ones((), requires_grad=True), torch.ones(2, 3, requires_grad=True), r"scores of shape \(\) are not"),
    ],
)
def test_bad_input_of_a_penalty_is_refused_with_a_remedy(scores: Tensor, images: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        r1_penalty(scores, images)


def test_scores_that_do_not_depend_on_the_images_are_an_error() -> None:
    images = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        r1_penalty(torch.ones(2, requires_grad=True) * 2, images)


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.slow
def test_r1_leaves_nothing_behind_unless_someone_keeps_its_graph(kept: bool) -> None:
    discriminator, images, losses = make_discriminator(normalised=True), make_images(), []

    def step() -> None:
        loss = loss_of(discriminator, images)
        torch.autograd.backward(loss, inputs=list(discriminator.parameters()), retain_graph=kept)
        discriminator.zero_grad()
        losses.append(loss if kept else loss.detach())

    found = detect_leaks(step, num_steps=24)
    assert found.leaking == kept, str(found)
