"""R1: its value, its second derivative, and that neither offloading nor checkpointing changes a bit of it."""

from collections.abc import Callable

import gradients
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from hf_memopt import ActivationOffloader, SyncCopier, apply_selective_checkpointing, detect_leaks
from hf_memopt.training.loss_terms import r1_penalty


def make_discriminator(normalised: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, 1, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 4, 2, 1), nn.Tanh(), nn.Conv2d(8, 1, 3)]
    return nn.Sequential(*(spectral_norm(x) if normalised and isinstance(x, nn.Conv2d) else x for x in layers))


def make_images() -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def loss_of(discriminator: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    scores = discriminator(images)
    return torch.relu(1 - scores).mean() + 2.5 * r1_penalty(scores, images)


def test_of_a_linear_discriminator_it_is_the_squared_norm_of_its_weights() -> None:
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


def test_its_derivative_is_that_of_finite_differences() -> None:
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
def test_offloading_changes_no_bit(mode: str, normalised: bool) -> None:
    """Also of passes without R1 between passes with it, and of the passes that "auto" has planned."""
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
def test_checkpointing_changes_no_bit(how: str) -> None:
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
    assert penalty.item() == 3 * 300**2  # more than float16 can hold


@pytest.mark.parametrize(
    ("scores", "images", "message"),
    [
        (torch.ones(2, requires_grad=True), torch.ones(2, 3), r"requires no gradient; call images.requires_grad_\(\)"),
        (torch.ones(2), torch.ones(2, 3, requires_grad=True), "scores has no graph; call the discriminator with"),
        (torch.ones(3, requires_grad=True), torch.ones(2, 3, requires_grad=True), r"scores of shape \(3,\) are not"),
        (torch.ones((), requires_grad=True), torch.ones(2, 3, requires_grad=True), r"scores of shape \(\) are not"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(scores: Tensor, images: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        r1_penalty(scores, images)


def test_scores_that_do_not_depend_on_the_images_are_an_error() -> None:
    images = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        r1_penalty(torch.ones(2, requires_grad=True) * 2, images)


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("kept", [False, True])
def test_it_leaves_nothing_behind_unless_someone_keeps_its_graph(kept: bool) -> None:
    discriminator, images, losses = make_discriminator(normalised=True), make_images(), []

    def step() -> None:
        loss = loss_of(discriminator, images)
        torch.autograd.backward(loss, inputs=list(discriminator.parameters()), retain_graph=kept)
        discriminator.zero_grad()
        losses.append(loss if kept else loss.detach())

    found = detect_leaks(step, num_steps=24)
    assert found.leaking == kept, str(found)
