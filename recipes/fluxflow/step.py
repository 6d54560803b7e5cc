"""One update of the discriminator and one of the VAE, on any device and without a training loop around.

    models = build_models(ModelOptions(), LossOptions(), LeverOptions())
    gan = Gan(models, make_optimizers(models, TrainingOptions()), LossOptions(), LeverOptions())
    step(gan, make_batch(4, 64, device), Weights(kl=1e-3, adversarial=0.5), with_r1=True)

Nothing in here waits for the device or decides by a tensor's values, but for the checks of `finite`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from hf_memopt.activations import ActivationOffloader
from hf_memopt.recipes.common.finite import FiniteCheck
from hf_memopt.recipes.fluxflow.losses import (
    Figures,
    Weights,
    draw_latents,
    generator_hinge_loss,
    hinge_loss,
    kl_divergence,
    reconstruction_loss,
    wide,
)
from hf_memopt.recipes.fluxflow.model import Models
from hf_memopt.recipes.fluxflow.options import LeverOptions, LossOptions, Options, TrainingOptions
from hf_memopt.training.loss_terms import r1_penalty

Context = Callable[[], AbstractContextManager[Any]]


class Optimizers(NamedTuple):
    vae: Any
    discriminator: Any


class FiniteChecks(NamedTuple):
    vae: FiniteCheck
    discriminator: FiniteCheck


@dataclass
class Gan:
    models: Models  # on one device
    optimizers: Optimizers  # torch's, or as accelerate prepared them
    losses: LossOptions
    levers: LeverOptions
    micro_batch_size: int = 0  # images per forward pass; 0: the whole batch
    max_grad_norm: float = 1.0
    finite: FiniteChecks | None = None
    autocast: Context = nullcontext  # around each forward pass
    offloader: ActivationOffloader | None = None
    synchronize: Callable[[list[nn.Parameter]], None] = lambda parameters: None  # before each update
    phase: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()  # around each update

    def saving(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext() if self.offloader is None else self.offloader.offload_context(model)


def make_optimizers(models: Models, training: TrainingOptions) -> Optimizers:
    return Optimizers(
        torch.optim.AdamW(models.vae.parameters(), training.learning_rate),
        torch.optim.AdamW(models.discriminator.parameters(), training.discriminator_learning_rate, betas=(0.5, 0.999)),
    )


def make_gan(models: Models, options: Options, accelerator: Accelerator, **hooks: Any) -> Gan:
    return Gan(
        models,
        Optimizers(*map(accelerator.prepare_optimizer, make_optimizers(models, options.training))),
        options.losses,
        options.levers,
        micro_batch_size=options.training.micro_batch_size,
        max_grad_norm=options.training.max_grad_norm,
        autocast=accelerator.autocast,
        offloader=options.offload.make_offloader(accelerator.device),
        **hooks,
    )


def make_batch(batch_size: int, resolution: int, device: torch.device | str, seed: int = 0) -> Tensor:
    """Return noise in the shape and range of images, `(batch_size, 3, resolution, resolution)` in [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(batch_size, 3, resolution, resolution, generator=generator) * 2 - 1).to(device)


def step(gan: Gan, images: Tensor, weights: Weights, *, with_r1: bool) -> Figures:
    """Make one update of the discriminator, then one of the VAE, on `images`, `(batch, 3, height, width)` in [-1, 1].

    Returns the mean losses and the gradients' norms before clipping, `()` each, on the device.
    """
    parts = images.split(gan.micro_batch_size or len(images))
    with gan.phase("discriminator"):
        figures = update_discriminator(gan, parts, with_r1)
    with gan.phase("generator"):
        return figures | update_vae(gan, parts, weights)


def update_discriminator(gan: Gan, parts: Sequence[Tensor], with_r1: bool) -> Figures:
    discriminator, optimizer = gan.models.discriminator, gan.optimizers.discriminator
    parameters = list(discriminator.parameters())
    optimizer.zero_grad()  # also those left by an update of the VAE without --freeze_discriminator
    check = None if gan.finite is None else gan.finite.discriminator
    if check is not None:
        check.begin_update()  # without their gradients too
    figures = []
    for part, share in _shares(parts):
        fake = reconstruct(gan, part)  # without a graph: this update is the discriminator's
        with gan.saving(discriminator):
            with gan.autocast():
                real = part.detach().requires_grad_(with_r1)
                real_scores, fake_scores = wide(discriminator(real)), wide(discriminator(fake))
            loss = hinge_loss(real_scores, fake_scores)
            found = {"discriminator": loss.detach()}
            if with_r1:
                penalty = r1_penalty(real_scores, real)
                found["r1"] = penalty.detach()
                loss = loss + gan.losses.r1_gamma / 2 * penalty
        torch.autograd.backward(loss * share, inputs=parameters)  # images would get a gradient too
        if check is not None:
            check.end_micro_batch(loss)
        figures.append((found, share))
    norm = apply_gradients(gan, parameters, optimizer, check)
    return {**_mean(figures), "discriminator_grad_norm": norm}


@torch.no_grad()
def reconstruct(gan: Gan, images: Tensor) -> Tensor:
    with gan.autocast():  # one of its own: autocast keeps casts of weights, and without gradients they have no graph
        vae = gan.models.vae
        output: Tensor = vae.decode(draw_latents(vae.encode(images).latent_dist)).sample
    return wide(output)


def update_vae(gan: Gan, parts: Sequence[Tensor], weights: Weights) -> Figures:
    """Update by reconstruction and KL losses for the whole VAE, and the adversarial loss for its decoder."""
    vae, optimizer = gan.models.vae, gan.optimizers.vae
    backward = backward_decoding_once if gan.levers.decode == "once" else backward_decoding_twice
    check = None if gan.finite is None else gan.finite.vae
    optimizer.zero_grad()
    figures = []
    with frozen(gan.models.discriminator) if gan.levers.freeze_discriminator else nullcontext():
        for part, share in _shares(parts):
            found = backward(gan, part, weights, share)
            if check is not None:
                check.end_micro_batch(torch.stack(list(found.values())).sum())
            figures.append((found, share))
    norm = apply_gradients(gan, list(vae.parameters()), optimizer, check)
    return {**_mean(figures), "grad_norm": norm}


def backward_decoding_twice(gan: Gan, images: Tensor, weights: Weights, share: float) -> Figures:
    """Run one backward through two decodings: the adversarial one begins at detached latents."""
    vae = gan.models.vae
    with gan.saving(vae):
        latents, kl = _encode(gan, images)
        loss, figures = _reconstruction(gan, _decode(gan, latents), images)
        adversarial = _adversarial(gan, _decode(gan, latents.detach()))
        loss = loss + weights.kl * kl + weights.adversarial * adversarial
    (loss * share).backward()
    return {**figures, "kl": kl.detach(), "adversarial": adversarial.detach()}


def backward_decoding_once(gan: Gan, images: Tensor, weights: Weights, share: float) -> Figures:
    """Take two vector-Jacobian products of one decoding: to latents without the adversarial gradient, to weights with.

    Both losses are differentiated by the decoder's output first, one after the other, so that LPIPS' graph and the
    discriminator's are gone when the decoder's backward begins.
    """
    vae = gan.models.vae
    decoder = [each for name, each in vae.named_parameters() if name.startswith(("decoder.", "post_quant_conv."))]
    with gan.saving(vae):
        latents, kl = _encode(gan, images)
        entry = latents.detach().requires_grad_()
        output = _decode(gan, entry)
    # From here on both losses see a leaf, so that their graphs end at the decoder's output.
    seen = output.detach().requires_grad_()
    loss, figures = _reconstruction(gan, seen, images)
    (gradient,) = torch.autograd.grad(loss * share, seen)
    adversarial = _adversarial(gan, seen)
    discriminator = [] if gan.levers.freeze_discriminator else list(gan.models.discriminator.parameters())
    torch.autograd.backward(weights.adversarial * adversarial * share, inputs=[seen, *discriminator])
    assert seen.grad is not None
    # The encoder sees the reconstruction's gradient alone, the decoder's weights the sum of both.
    (latents_gradient,) = torch.autograd.grad(output, entry, gradient, retain_graph=True)
    torch.autograd.backward(output, gradient + seen.grad, inputs=decoder)
    torch.autograd.backward([latents, kl], [latents_gradient, torch.full_like(kl, weights.kl * share)])
    return {**figures, "kl": kl.detach(), "adversarial": adversarial.detach()}


def _encode(gan: Gan, images: Tensor) -> tuple[Tensor, Tensor]:
    with gan.autocast():
        posterior = gan.models.vae.encode(images).latent_dist
    return draw_latents(posterior), kl_divergence(posterior, gan.losses.free_bits)


def _decode(gan: Gan, latents: Tensor) -> Tensor:
    with gan.autocast():
        output: Tensor = gan.models.vae.decode(latents).sample
    return wide(output)


def _reconstruction(gan: Gan, output: Tensor, images: Tensor) -> tuple[Tensor, Figures]:
    with gan.autocast():
        return reconstruction_loss(output, images, gan.losses, gan.levers, gan.models.perceptual)


def _adversarial(gan: Gan, output: Tensor) -> Tensor:
    with gan.autocast():
        scores = gan.models.discriminator(output)
    return generator_hinge_loss(wide(scores))


def apply_gradients(gan: Gan, parameters: list[nn.Parameter], optimizer: Any, check: FiniteCheck | None) -> Tensor:
    """Average over processes, check, clip, update; return the norm before clipping."""
    gan.synchronize(parameters)
    if check is not None:
        check.before_update()
    norm = clip_grad_norm_(parameters, gan.max_grad_norm)
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
