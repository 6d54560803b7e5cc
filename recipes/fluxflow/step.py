"""The losses of `train_fluxflow.py`, and one update of the discriminator and of the VAE, as loop and plans run them.

No update waits for the device or decides by a tensor's values, but for the checks of `finite`.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from hf_memopt.activations import SelectiveCheckpoint
from hf_memopt.recipes.common import loop
from hf_memopt.recipes.fluxflow.model import Models, PerceptualLoss, WeightAverage, average_gradients
from hf_memopt.recipes.fluxflow.options import LeverOptions, LossOptions, TrainingOptions
from hf_memopt.training.finite_check import FiniteCheck
from hf_memopt.training.loss_terms import chunked_loss, r1_penalty, wide

Figures = dict[str, Tensor]


def detail_weighted_l1(output: Tensor, target: Tensor, detail_weight: float) -> Tensor:
    """Return the L1 error of images blurred by a 3 x 3 mean, plus `detail_weight` times that of the details removed."""
    blurred, blurred_target = (
        functional.avg_pool2d(each, 3, 1, 1, count_include_pad=False) for each in (output, target)
    )
    coarse = functional.l1_loss(blurred, blurred_target)
    return coarse + detail_weight * functional.l1_loss(output - blurred, target - blurred_target)


def perceptual_loss(model: PerceptualLoss, output: Tensor, target: Tensor, gradient: str) -> Tensor:
    """Return the mean LPIPS, `()`; `gradient` is `lpips_gradient` of the flags."""
    if gradient == "early":
        return chunked_loss(model, output, target)
    if gradient == "checkpoint":
        return SelectiveCheckpoint("all")(model, output, target).mean()
    return model(output, target).mean()


def reconstruction_loss(
    output: Tensor, target: Tensor, losses: LossOptions, levers: LeverOptions, perceptual: PerceptualLoss | None
) -> tuple[Tensor, Figures]:
    parts = {"l1": detail_weighted_l1(output, target, losses.detail_weight), "mse": functional.mse_loss(output, target)}
    total = parts["l1"] + losses.mse_weight * parts["mse"]
    if perceptual is not None:
        parts[perceptual.name] = perceptual_loss(perceptual, output, target, levers.lpips_gradient)
        total = total + losses.lpips_weight * parts[perceptual.name]
    # Copies: torch's mse_loss leaves the memory of all squares behind its mean, which a view would keep.
    return total, {name: value.detach().clone() for name, value in parts.items()}


def draw_latents(posterior: Any) -> Tensor:
    """Draw from diffusers' Gaussian posterior, in float32 for any precision of the encoder."""
    mean, std = wide(posterior.mean), wide(posterior.std)
    return mean + std * torch.randn_like(mean)


def kl_divergence(posterior: Any, free_bits: float) -> Tensor:
    """Return the mean over latents of the divergence, in nats, of diffusers' posterior from a standard normal."""
    mean, logvar = wide(posterior.mean), wide(posterior.logvar)
    each = 0.5 * (mean.square() + logvar.exp() - 1 - logvar)
    return each.clamp(min=free_bits).mean()


class Weights(NamedTuple):
    kl: float
    adversarial: float


def weights_at(step: int, losses: LossOptions) -> Weights:
    """Return the weights after `step` global steps: both rise from 0 along a cosine, each within its warm-up."""
    return Weights(
        losses.kl_weight * _risen(step, losses.kl_warmup_steps),
        losses.adversarial_weight * _risen(step, losses.adversarial_warmup_steps),
    )


def _risen(step: int, num_steps: int) -> float:
    return 0.5 * (1 - math.cos(math.pi * min(1.0, step / num_steps))) if num_steps else 1.0


def hinge_loss(real_scores: Tensor, fake_scores: Tensor) -> Tensor:
    return torch.relu(1 - real_scores).mean() + torch.relu(1 + fake_scores).mean()


class OfBoth(NamedTuple):
    """Optimizers, or checks, of the two networks."""

    vae: Any
    discriminator: Any


@dataclass
class Progress(loop.Progress):
    num_discriminator_updates: int = 0


@dataclass(kw_only=True)
class Run(loop.Run):
    """Models, optimizers, schedules and checks are those of the VAE and the discriminator."""

    average: WeightAverage | None = None  # of the VAE's weights
    source: Any = None  # of the images; None where a step is only simulated
    progress: Progress = field(default_factory=Progress)
    place: tuple[int, int] = (0, 0)  # in the data, after the last whole step

    def position(self) -> dict[str, Any]:
        """Add the place of each process in the data: buckets fill up at different times."""
        return {"data": gather_object([list(self.place)]), **super().position()}

    def restore(self, position: dict[str, Any]) -> None:
        self.place = self.batches.position = tuple(position.pop("data")[self.accelerator.process_index])
        super().restore(position)


def make_optimizers(models: Models, training: TrainingOptions, accelerator: Accelerator) -> OfBoth:
    vae, discriminator = models.vae.parameters(), models.discriminator.parameters()
    return OfBoth(
        accelerator.prepare_optimizer(torch.optim.AdamW(vae, training.learning_rate)),
        accelerator.prepare_optimizer(
            torch.optim.AdamW(discriminator, training.discriminator_learning_rate, betas=(0.5, 0.999))
        ),
    )


def step(run: Run, images: Tensor, weights: Weights, *, with_r1: bool) -> Figures:
    """Make one update of the discriminator, then one of the VAE, on `images`, `(batch, 3, height, width)` in [-1, 1].

    Returns the mean losses and the gradients' norms before clipping, `()` each, on the device.
    """
    parts = images.split(run.options.training.micro_batch_size or len(images))
    with run.memory.phase("discriminator"):
        figures = update_discriminator(run, parts, with_r1)
    with run.memory.phase("generator"):
        return figures | update_vae(run, parts, weights)


def update_discriminator(run: Run, parts: Sequence[Tensor], with_r1: bool) -> Figures:
    discriminator, optimizer = run.model.discriminator, run.optimizer.discriminator
    parameters = list(discriminator.parameters())
    optimizer.zero_grad()  # also those left by an update of the VAE without --freeze_discriminator
    check = None if run.finite is None else run.finite.discriminator
    if check is not None:
        check.begin_update()  # without their gradients too
    figures = []
    for part, share in _shares(parts):
        fake = reconstruct(run, part)  # without a graph: this update is the discriminator's
        with run.saving(discriminator):
            with run.accelerator.autocast():
                real = part.detach().requires_grad_(with_r1)
                real_scores, fake_scores = wide(discriminator(real)), wide(discriminator(fake))
            loss = hinge_loss(real_scores, fake_scores)
            found = {"discriminator": loss.detach()}
            if with_r1:
                penalty = r1_penalty(real_scores, real)
                found["r1"] = penalty.detach()
                loss = loss + run.options.losses.r1_gamma / 2 * penalty
        torch.autograd.backward(loss * share, inputs=parameters)  # images would get a gradient too
        if check is not None:
            check.end_micro_batch(loss)
        figures.append((found, share))
    norm = apply_gradients(run, parameters, optimizer, check)
    return {**_mean(figures), "discriminator_grad_norm": norm}


@torch.no_grad()
def reconstruct(run: Run, images: Tensor) -> Tensor:
    # A context of its own: autocast keeps casts of weights, and without gradients they have no graph.
    with run.accelerator.autocast():
        return _decode(run, draw_latents(run.model.vae.encode(images).latent_dist))


def update_vae(run: Run, parts: Sequence[Tensor], weights: Weights) -> Figures:
    """Update by reconstruction and KL losses for the whole VAE, and the adversarial loss for its decoder."""
    vae, optimizer = run.model.vae, run.optimizer.vae
    backward = backward_decoding_once if run.options.levers.decode == "once" else backward_decoding_twice
    check = None if run.finite is None else run.finite.vae
    optimizer.zero_grad()
    figures = []
    with frozen(run.model.discriminator) if run.options.levers.freeze_discriminator else nullcontext():
        for part, share in _shares(parts):
            found = backward(run, part, weights, share)
            if check is not None:
                check.end_micro_batch(torch.stack(list(found.values())).sum())
            figures.append((found, share))
    norm = apply_gradients(run, list(vae.parameters()), optimizer, check)
    return {**_mean(figures), "grad_norm": norm}


def backward_decoding_twice(run: Run, images: Tensor, weights: Weights, share: float) -> Figures:
    """Run one backward through two decodings: the adversarial one begins at detached latents."""
    vae = run.model.vae
    with run.saving(vae):
        latents, kl = _encode(run, images)
        loss, figures = _reconstruction(run, _decode(run, latents), images)
        adversarial = _adversarial(run, _decode(run, latents.detach()))
        loss = loss + weights.kl * kl + weights.adversarial * adversarial
    (loss * share).backward()
    return {**figures, "kl": kl.detach(), "adversarial": adversarial.detach()}


def backward_decoding_once(run: Run, images: Tensor, weights: Weights, share: float) -> Figures:
    """Take two vector-Jacobian products of one decoding: to latents without the adversarial gradient, to weights with.

    Both losses are differentiated by the decoder's output first, one after the other, so that LPIPS' graph and the
    discriminator's are gone when the decoder's backward begins.
    """
    vae = run.model.vae
    decoder = [each for name, each in vae.named_parameters() if name.startswith(("decoder.", "post_quant_conv."))]
    with run.saving(vae):
        latents, kl = _encode(run, images)
        entry = latents.detach().requires_grad_()
        output = _decode(run, entry)
    # From here on both losses see a leaf, so that their graphs end at the decoder's output.
    seen = output.detach().requires_grad_()
    loss, figures = _reconstruction(run, seen, images)
    (gradient,) = torch.autograd.grad(loss * share, seen)
    adversarial = _adversarial(run, seen)
    discriminator = [] if run.options.levers.freeze_discriminator else list(run.model.discriminator.parameters())
    torch.autograd.backward(weights.adversarial * adversarial * share, inputs=[seen, *discriminator])
    assert seen.grad is not None
    # The encoder sees the reconstruction's gradient alone, the decoder's weights the sum of both.
    (latents_gradient,) = torch.autograd.grad(output, entry, gradient, retain_graph=True)
    torch.autograd.backward(output, gradient + seen.grad, inputs=decoder)
    torch.autograd.backward([latents, kl], [latents_gradient, torch.full_like(kl, weights.kl * share)])
    return {**figures, "kl": kl.detach(), "adversarial": adversarial.detach()}


def _encode(run: Run, images: Tensor) -> tuple[Tensor, Tensor]:
    with run.accelerator.autocast():
        posterior = run.model.vae.encode(images).latent_dist
    return draw_latents(posterior), kl_divergence(posterior, run.options.losses.free_bits)


def _decode(run: Run, latents: Tensor) -> Tensor:
    with run.accelerator.autocast():
        output: Tensor = run.model.vae.decode(latents).sample
    return wide(output)


def _reconstruction(run: Run, output: Tensor, images: Tensor) -> tuple[Tensor, Figures]:
    with run.accelerator.autocast():
        return reconstruction_loss(output, images, run.options.losses, run.options.levers, run.model.perceptual)


def _adversarial(run: Run, output: Tensor) -> Tensor:
    """Return the generator's hinge loss, `()`."""
    with run.accelerator.autocast():
        scores = run.model.discriminator(output)
    return -wide(scores).mean()


def apply_gradients(run: Run, parameters: list[nn.Parameter], optimizer: Any, check: FiniteCheck | None) -> Tensor:
    """Average over processes, check, clip, update; return the norm before clipping."""
    average_gradients(run.accelerator, parameters)
    if check is not None:
        check.before_update()
    norm = clip_grad_norm_(parameters, run.options.training.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm.detach()


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _shares(parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, float]]:
    total = sum(map(len, parts))
    return ((part, len(part) / total) for part in parts)


def _mean(figures: Iterable[tuple[Figures, float]]) -> Figures:
    total: Figures = {}
    for found, share in figures:
        for name, value in found.items():
            total[name] = total.get(name, torch.zeros_like(value)) + value * share
    return total
