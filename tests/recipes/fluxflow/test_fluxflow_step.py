"""Tests that levers change no gradient, and that no network's update touches the other network."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from late_imports import LateModule
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.memory import SavedBytes
from hf_memopt.recipes.common.options import OffloadOptions
from hf_memopt.training import NonFiniteGradientError

finite = LateModule("hf_memopt.training.finite_check")
fluxflow_losses = LateModule("hf_memopt.recipes.fluxflow.step")
fluxflow_model = LateModule("hf_memopt.recipes.fluxflow.model")
options = LateModule("hf_memopt.recipes.fluxflow.options")
fluxflow_step = LateModule("hf_memopt.recipes.fluxflow.step")


TINY = options.ModelOptions(channels=[8, 16], discriminator_channels=8, discriminator_layers=2)
# Every lever at the setting that takes the most memory.
PLAIN = options.LeverOptions(lpips_gradient="plain", decode="twice", freeze_discriminator=False)
LOSSES = options.LossOptions()


def noise(batch_size: int) -> Tensor:
    """Return noise in the range of images, `(batch_size, 3, 32, 32)` in [-1, 1]."""
    return torch.rand(batch_size, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1


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


def make_run(
    levers: Any, kind: Any = torch.float32, *, model: Any = TINY, micro_batch_size: int = 0, autocast: Any = nullcontext
) -> Any:
    """Return a run whose weights are of that dtype, or on that device."""
    torch.manual_seed(0)
    made = fluxflow_model.build_models(model, replace(LOSSES, lpips_weight=0.0), levers)
    models = fluxflow_model.Models(*(each.to(kind) for each in (made.vae, made.discriminator, TinyPerceptual())))
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"), num_processes=1, autocast=autocast)
    accelerator.prepare_optimizer = lambda optimizer: optimizer
    training = options.TrainingOptions(micro_batch_size=micro_batch_size)
    given = options.Options(model, options.DataOptions(), LOSSES, training, levers, OffloadOptions(offload="off"))
    return fluxflow_step.Run(accelerator, given, models, fluxflow_step.make_optimizers(models, training, accelerator))


Gradients = dict[str, Tensor | None]


def gradients_of(
    levers: Any, dtype: torch.dtype = torch.float32, *, offloader: ActivationOffloader | None = None, **more: Any
) -> tuple[Gradients, Gradients]:
    run = make_run(levers, dtype, **more)
    run.offloader = offloader
    found: list[Gradients] = []

    def take(accelerator: Any, parameters: list[nn.Parameter]) -> None:
        named = run.model.discriminator if not found else run.model.vae
        found.append({name: p.grad.clone() for name, p in named.named_parameters() if p.grad is not None})

    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_memopt.recipes.fluxflow.step.average_gradients", take)
        fluxflow_step.step(run, noise(3).to(dtype), weights(), with_r1=True)
    discriminator, vae = found
    assert len(vae) == len(list(run.model.vae.parameters()))
    assert len(discriminator) == len(list(run.model.discriminator.parameters()))
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
@pytest.mark.sweep(share=0.3)
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
            patch.setattr("hf_memopt.recipes.fluxflow.step.torch.randn_like", torch.zeros_like)
            return gradients_of(levers, torch.float64, micro_batch_size=size, model=replace(TINY, spectral_norm=False))

    for levers in (PLAIN, options.LeverOptions()):
        for ours, theirs in zip(quiet(levers, 2), quiet(levers, 0), strict=True):
            assert relative_error(ours, theirs) < 1e-13


def test_the_adversarial_loss_reaches_the_decoder_only() -> None:
    """Check with the other losses off, with one decoding and with two."""
    losses = replace(LOSSES, detail_weight=0.0, mse_weight=0.0, lpips_weight=0.0)
    for decode in ("once", "twice"):
        run = make_run(replace(PLAIN, decode=decode))
        run.options = run.options._replace(losses=losses)
        backward = getattr(fluxflow_step, f"backward_decoding_{decode}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "hf_memopt.recipes.fluxflow.step.reconstruction_loss", lambda output, *rest: (output.sum() * 0, {})
            )
            backward(run, noise(2), fluxflow_losses.Weights(0.0, 0.5), 1.0)
        reached = {name.split(".")[0] for name, p in run.model.vae.named_parameters() if p.grad.any()}
        assert reached == {"decoder", "post_quant_conv"}


@pytest.mark.parametrize(("freeze", "num_stray"), [(True, 0), (False, 8)])
@pytest.mark.parametrize("decode", ["once", "twice"])
def test_a_frozen_discriminator_gets_no_stray_gradients(decode: str, freeze: bool, num_stray: int) -> None:
    run = make_run(replace(PLAIN, decode=decode, freeze_discriminator=freeze))
    fluxflow_step.step(run, noise(2), weights(), with_r1=False)
    stray = [p for p in run.model.discriminator.parameters() if p.grad is not None]
    assert len(stray) == num_stray
    assert all(p.requires_grad for p in run.model.discriminator.parameters())
    assert not any(p.grad is not None for p in run.model.vae.parameters())


def test_freezing_ends_with_an_error_too() -> None:
    discriminator = make_run(PLAIN).model.discriminator
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
        run = make_run(levers)
        counter = SavedBytes(exclude=run.model.vae.parameters())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "saving", lambda model: counter)
            getattr(fluxflow_step, f"backward_decoding_{levers.decode}")(
                run, noise(2), fluxflow_losses.Weights(0.0, 0.5), 1.0
            )
        return counter.total_bytes

    assert saved(replace(PLAIN, decode="once")) < 0.65 * saved(PLAIN)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    """Neither by an infinite loss of the VAE, nor by a discriminator whose hinge loss has no gradient at NaN."""
    run = make_run(options.LeverOptions(freeze_discriminator=False))
    checks = [
        finite.FiniteCheck(Accelerator(cpu=True), *pair, lambda: 7)
        for pair in zip(run.model[:2], run.optimizer, strict=True)
    ]
    run.finite = fluxflow_step.OfBoth(*checks)
    images = noise(2)
    fluxflow_step.step(run, images, weights(), with_r1=True)
    before = [p.detach().clone() for p in run.model.vae.parameters()]
    given = run.options
    run.options = given._replace(losses=replace(LOSSES, mse_weight=float("inf")))
    with pytest.raises(NonFiniteGradientError, match=r"gradient at step 7\..*\n  rank 0, micro-batch 1: decoder\."):
        fluxflow_step.step(run, images, weights(), with_r1=False)
    assert all(map(torch.equal, before, run.model.vae.parameters()))
    run.options = given
    with pytest.raises(NonFiniteGradientError, match="loss"):
        fluxflow_step.update_discriminator(run, [images * float("nan")], False)


@pytest.mark.parametrize("levers", [PLAIN, options.LeverOptions(checkpoint_vae=True)])
def test_bfloat16_trains_every_weight(levers: Any) -> None:
    """Check that casts of weights that autocast keeps from passes without gradients serve no pass with gradients."""
    vae, discriminator = gradients_of(levers, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    exact = gradients_of(levers)
    assert 0 < relative_error(vae, exact[0]) < 0.1
    assert 0 < relative_error(discriminator, exact[1]) < 0.1


def test_a_step_needs_no_values_of_tensors() -> None:
    """Run a step on the meta device, where each read of a value fails."""
    run = make_run(options.LeverOptions(), "meta")
    figures = fluxflow_step.step(run, noise(2).to("meta"), weights(), with_r1=True)
    assert all(value.device.type == "meta" and value.shape == () for value in figures.values())


def test_spectral_normalisation_is_never_checkpointed() -> None:
    levers = options.LeverOptions(checkpoint_discriminator=True)
    with pytest.raises(ValueError, match="cannot be checkpointed: its forward writes the buffer '_u'"):
        make_run(levers)
    free = replace(TINY, spectral_norm=False)
    found, expected = gradients_of(levers, model=free), gradients_of(options.LeverOptions(), model=free)
    assert all(map(equal, found, expected))
