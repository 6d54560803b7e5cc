"""The losses of `train_fluxflow.py`."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_memopt.activations import SelectiveCheckpoint
from hf_memopt.recipes.fluxflow.model import PerceptualLoss
from hf_memopt.recipes.fluxflow.options import LeverOptions, LossOptions
from hf_memopt.training.loss_terms import chunked_loss, wide

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
