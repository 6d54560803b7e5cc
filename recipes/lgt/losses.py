"""The losses of `train_lgt.py`. All compute in float32 at least, also under autocast."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_memopt.training.loss_terms import wide


def sliced_wasserstein(
    output: Tensor, target: Tensor, *, patch_size: int = 3, num_projections: int = 64, max_samples: int = 8192
) -> Tensor:
    """Return the squared distance between the distributions of two sets of patches, along random directions, `()`.

    It is no mean over samples: the mean over the halves of a batch is larger, and has another gradient. Costs a sort of
    `max_samples` numbers for each direction.

    Args:
        output: latents, `(batch, channels, height, width)`.
        target: as many others, in no particular order.
        patch_size: side of a patch; there is one around each position, padded with zeros.
        num_projections: directions, drawn anew in each call.
        max_samples: patches drawn from each set, the same positions in both.

    Source: J. Rabin, G. Peyré, J. Delon, M. Bernot: Wasserstein Barycenter and Its Application to Texture Mixing, 2011.
    """
    with full_precision(output):
        ours, theirs = (_patches(latents, patch_size) for latents in (output, target))
        if len(ours) > max_samples:
            rows = torch.randperm(len(ours), device=ours.device)[:max_samples]
            ours, theirs = ours[rows], theirs[rows]
        drawn = torch.randn(ours.shape[1], num_projections, device=ours.device, dtype=ours.dtype)
        directions = F.normalize(drawn, dim=0)
        return F.mse_loss((ours @ directions).sort(dim=0).values, (theirs @ directions).sort(dim=0).values)


def self_similarity_difference(output: Tensor, content: Tensor, max_positions: int | None = None) -> Tensor:
    """Return the mean squared difference between the cosine similarities of all pairs of positions, `()`.

    A mean over samples `(batch, channels, height, width)`. Memory and time are quadratic in positions: at 32 x 32,
    4 MiB per sample and matrix. With `max_positions` only so many are compared, drawn anew in each call.
    """
    with full_precision(output):
        ours, theirs = (wide(latents).flatten(2) for latents in (output, content))
        num_positions = ours.shape[2]
        if max_positions is not None and max_positions < num_positions:
            chosen = torch.randperm(num_positions, device=ours.device)[:max_positions]
            ours, theirs = ours[..., chosen], theirs[..., chosen]
        return F.mse_loss(_similarities(ours), _similarities(theirs))


def full_precision(tensor: Tensor) -> Any:
    return torch.autocast(tensor.device.type, enabled=False)


def _patches(latents: Tensor, size: int) -> Tensor:
    """Return one patch for each position of each sample: `(batch * height * width, channels * size * size)`."""
    unfolded = F.unfold(wide(latents), size, padding=size // 2)
    return unfolded.transpose(1, 2).flatten(0, 1)


def _similarities(latents: Tensor) -> Tensor:
    directions = F.normalize(latents, dim=1)
    return directions.transpose(1, 2) @ directions
