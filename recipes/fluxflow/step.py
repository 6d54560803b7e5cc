"""One update of the discriminator and one of the VAE, as the loop of `train_fluxflow.py` and its plans run them.

Nothing in here waits for the device or decides by a tensor's values, but for the checks of `finite`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from hf_memopt.recipes.common import loop
from hf_memopt.recipes.fluxflow.losses import (
    Figures,
    Weights,
    draw_latents,
    hinge_loss,
    kl_divergence,
    reconstruction_loss,
)
from hf_memopt.recipes.fluxflow.model import Models
from hf_memopt.recipes.fluxflow.options import TrainingOptions
from hf_memopt.recipes.fluxflow.training_aids import WeightAverage, average_gradients
from hf_memopt.training.finite_check import FiniteCheck
from hf_memopt.training.loss_terms import r1_penalty, wide


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
