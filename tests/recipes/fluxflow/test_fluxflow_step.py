"""Tests that levers change no gradient, and that no network's update touches the other network."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from late_imports import LateModule
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.memory import SavedBytes
from hf_memopt.training import NonFiniteGradientError

finite = LateModule("hf_memopt.recipes.common.finite")
fluxflow_losses = LateModule("hf_memopt.recipes.fluxflow.losses")
fluxflow_model = LateModule("hf_memopt.recipes.fluxflow.model")
options = LateModule("hf_memopt.recipes.fluxflow.options")
fluxflow_step = LateModule("hf_memopt.recipes.fluxflow.step")


TINY = options.ModelOptions(channels=[8, 16], discriminator_channels=8, discriminator_layers=2)
# Every lever at the setting that takes the most memory.
PLAIN = options.LeverOptions(lpips_gradient="plain", decode="twice", freeze_discriminator=False)
LOSSES = options.LossOptions()


def weights() -> Any:
    return fluxflow_losses.Weights(kl=1e-3, adversarial=0.5)


class TinyPerceptual(nn.Module):
    """A stand-in for LPIPS, whose VGG takes seconds."""

    name = "lpips_load_only"

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 12, 3, 1, 1), nn.ReLU(), nn.Conv2d(12, 12, 3, 1, 1), nn.ReLU())
        self.requires_grad_(False)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (self.features(output) - self.features(target)).square().mean((1, 2, 3), keepdim=True)


def make_gan(levers: Any, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(0)
    made = fluxflow_model.build_models(more.pop("model", TINY), replace(LOSSES, lpips_weight=0.0), levers)
    models = fluxflow_model.Models(*(each.to(dtype) for each in (made.vae, made.discriminator, TinyPerceptual())))
    return fluxflow_step.Gan(
        models, fluxflow_step.make_optimizers(models, options.TrainingOptions()), LOSSES, levers, **more
    )


Gradients = dict[str, Tensor | None]


def gradients_of(levers: Any, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[Gradients, Gradients]:
    gan = make_gan(levers, dtype, **more)
    found: list[Gradients] = []

    def take(parameters: list[nn.Parameter]) -> None:
        named = gan.models.discriminator if not found else gan.models.vae
        found.append({name: p.grad.clone() for name, p in named.named_parameters() if p.grad is not None})

    gan.synchronize = take
    torch.manual_seed(1)
    fluxflow_step.step(gan, fluxflow_step.make_batch(3, 32, "cpu").to(dtype), weights(), with_r1=True)
    discriminator, vae = found
    assert len(vae) == len(list(gan.models.vae.parameters()))
    assert len(discriminator) == len(list(gan.models.discriminator.parameters()))
    return vae, discriminator


@pytest.fixture(scope="module")
def plain() -> tuple[Gradients, Gradients]:
    return gradients_of(PLAIN)


def relative_error(ours: Gradients, theirs: Gradients) -> float:
    """Return the largest difference relative to the whole gradient's norm: some entries are zero."""
    norm = torch.stack([each.norm() for each in theirs.values()]).norm()
    return max(((ours[name] - theirs[name]).norm() / norm).item() for name in theirs)


def equal(ours: Gradients, theirs: Gradients) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


BITWISE = {
    "lpips_checkpoint": {"lpips_gradient": "checkpoint"},
    "freeze_discriminator": {"freeze_discriminator": True},
    "checkpoint_vae": {"checkpoint_vae": True},
}


@pytest.mark.parametrize("lever", BITWISE)
def test_these_levers_change_no_bit(lever: str, plain: tuple[Gradients, Gradients]) -> None:
    found = gradients_of(replace(PLAIN, **BITWISE[lever]))
    assert all(map(equal, found, plain))


@pytest.mark.parametrize("mode", ["all", "inputs"])
@pytest.mark.parametrize("decode", ["once", "twice"])
def test_offloading_changes_no_bit(decode: str, mode: str) -> None:
    levers = replace(PLAIN, decode=decode, checkpoint_vae=mode == "inputs")
    offloader = ActivationOffloader(mode=mode, offload_threshold_mb=0, copier=SyncCopier())
    found = gradients_of(levers, offloader=offloader)
    assert offloader.stats.bytes_moved > 0
    assert offloader.stats.host_bytes_live == 0
    assert all(map(equal, found, gradients_of(levers)))


ROUNDED = {
    "lpips_early": {"lpips_gradient": "early"},
    "decode_once": {"decode": "once"},
    "all": {"lpips_gradient": "early", "decode": "once", "freeze_discriminator": True, "checkpoint_vae": True},
}


@pytest.mark.parametrize("lever", ROUNDED)
def test_these_levers_change_gradients_by_rounding_alone(lever: str, plain: tuple[Gradients, Gradients]) -> None:
    """Check for 1e-5 of the gradient in float32, and 2^29 times less in float64: sums are reordered."""
    levers = replace(PLAIN, **ROUNDED[lever])
    vae, discriminator = gradients_of(levers)
    assert equal(discriminator, plain[1])
    assert relative_error(vae, plain[0]) < 1e-5
    exact = gradients_of(PLAIN, torch.float64)[0]
    assert relative_error(gradients_of(levers, torch.float64)[0], exact) < 1e-5 / 2**29


def test_decoding_once_changes_no_bit_of_the_encoders_gradient(plain: tuple[Gradients, Gradients]) -> None:
    found, _ = gradients_of(replace(PLAIN, decode="once"))
    encoder = [name for name in found if name.startswith(("encoder.", "quant_conv."))]
    assert len(encoder) > 10
    assert all(torch.equal(found[name], plain[0][name]) for name in encoder)


def test_micro_batches_change_gradients_by_rounding_alone() -> None:
    """Compare without the latents' noise, whose draws depend on micro-batches' sizes."""

    def quiet(levers: Any, size: int) -> tuple[Gradients, Gradients]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hf_memopt.recipes.fluxflow.losses.torch.randn_like", torch.zeros_like)
            return gradients_of(levers, torch.float64, micro_batch_size=size, model=replace(TINY, spectral_norm=False))

    for levers in (PLAIN, options.LeverOptions()):
        for ours, theirs in zip(quiet(levers, 2), quiet(levers, 0), strict=True):
            assert relative_error(ours, theirs) < 1e-13


def test_the_adversarial_loss_reaches_the_decoder_only() -> None:
    """Check with the other losses off, with one decoding and with two."""
    losses = replace(LOSSES, detail_weight=0.0, mse_weight=0.0, lpips_weight=0.0)
    for decode in ("once", "twice"):
        gan = make_gan(replace(PLAIN, decode=decode))
        gan.losses = losses
        backward = getattr(fluxflow_step, f"backward_decoding_{decode}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "hf_memopt.recipes.fluxflow.step.reconstruction_loss", lambda output, *rest: (output.sum() * 0, {})
            )
            backward(gan, fluxflow_step.make_batch(2, 32, "cpu"), fluxflow_losses.Weights(0.0, 0.5), 1.0)
        reached = {name.split(".")[0] for name, p in gan.models.vae.named_parameters() if p.grad.any()}
        assert reached == {"decoder", "post_quant_conv"}


@pytest.mark.parametrize(("freeze", "num_stray"), [(True, 0), (False, 8)])
@pytest.mark.parametrize("decode", ["once", "twice"])
def test_a_frozen_discriminator_gets_no_stray_gradients(decode: str, freeze: bool, num_stray: int) -> None:
    gan = make_gan(replace(PLAIN, decode=decode, freeze_discriminator=freeze))
    fluxflow_step.step(gan, fluxflow_step.make_batch(2, 32, "cpu"), weights(), with_r1=False)
    stray = [p for p in gan.models.discriminator.parameters() if p.grad is not None]
    assert len(stray) == num_stray
    assert all(p.requires_grad for p in gan.models.discriminator.parameters())
    assert not any(p.grad is not None for p in gan.models.vae.parameters())


def test_freezing_ends_with_an_error_too() -> None:
    discriminator = make_gan(PLAIN).models.discriminator
    discriminator.layers[0].bias.requires_grad_(False)
    before = [p.requires_grad for p in discriminator.parameters()]

    def fail() -> None:
        with fluxflow_step.frozen(discriminator):
            assert not any(p.requires_grad for p in discriminator.parameters())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [p.requires_grad for p in discriminator.parameters()] == before


def test_one_decoding_keeps_less() -> None:
    """Compare the bytes alive at the start of backward: two decodings, LPIPS and discriminator, or one decoding."""

    def saved(levers: Any) -> int:
        gan = make_gan(levers)
        counter = SavedBytes(exclude=gan.models.vae.parameters())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gan, "saving", lambda model: counter)
            getattr(fluxflow_step, f"backward_decoding_{levers.decode}")(
                gan, fluxflow_step.make_batch(2, 32, "cpu"), fluxflow_losses.Weights(0.0, 0.5), 1.0
            )
        return counter.total_bytes

    assert saved(replace(PLAIN, decode="once")) < 0.65 * saved(PLAIN)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    """Neither by an infinite loss of the VAE, nor by a discriminator whose hinge loss has no gradient at NaN."""
    gan = make_gan(options.LeverOptions(freeze_discriminator=False))
    checks = [
        finite.FiniteCheck(Accelerator(cpu=True), *pair, lambda: 7)
        for pair in zip(gan.models[:2], gan.optimizers, strict=True)
    ]
    gan.finite = fluxflow_step.FiniteChecks(*checks)
    images = fluxflow_step.make_batch(2, 32, "cpu")
    fluxflow_step.step(gan, images, weights(), with_r1=True)
    before = [p.detach().clone() for p in gan.models.vae.parameters()]
    mse_weight, gan.losses = gan.losses.mse_weight, replace(LOSSES, mse_weight=float("inf"))
    with pytest.raises(NonFiniteGradientError, match=r"gradient at step 7\..*\n  rank 0, micro-batch 1: decoder\."):
        fluxflow_step.step(gan, images, weights(), with_r1=False)
    assert all(map(torch.equal, before, gan.models.vae.parameters()))
    gan.losses = replace(LOSSES, mse_weight=mse_weight)
    with pytest.raises(NonFiniteGradientError, match="loss"):
        fluxflow_step.update_discriminator(gan, [images * float("nan")], False)


@pytest.mark.parametrize("levers", [PLAIN, options.LeverOptions(checkpoint_vae=True)])
def test_bfloat16_trains_every_weight(levers: Any) -> None:
    """Check that casts of weights that autocast keeps from passes without gradients serve no pass with gradients."""
    vae, discriminator = gradients_of(levers, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    exact = gradients_of(levers)
    assert 0 < relative_error(vae, exact[0]) < 0.1
    assert 0 < relative_error(discriminator, exact[1]) < 0.1


def test_a_step_needs_no_values_of_tensors() -> None:
    """Run a step on the meta device, where each read of a value fails."""
    made = make_gan(options.LeverOptions()).models
    models = fluxflow_model.Models(*(each.to("meta") for each in made))
    gan = fluxflow_step.Gan(
        models, fluxflow_step.make_optimizers(models, options.TrainingOptions()), LOSSES, options.LeverOptions()
    )
    figures = fluxflow_step.step(gan, fluxflow_step.make_batch(2, 32, "meta"), weights(), with_r1=True)
    assert all(value.device.type == "meta" and value.shape == () for value in figures.values())


def test_spectral_normalisation_is_never_checkpointed() -> None:
    levers = options.LeverOptions(checkpoint_discriminator=True)
    with pytest.raises(ValueError, match="cannot be checkpointed: its forward writes the buffer '_u'"):
        make_gan(levers)
    free = replace(TINY, spectral_norm=False)
    found, expected = gradients_of(levers, model=free), gradients_of(options.LeverOptions(), model=free)
    assert all(map(equal, found, expected))


# ------------------------------------------------------------------------------------------------------- losses


# -------------------------------------------------------------------------------------------------------- LPIPS
