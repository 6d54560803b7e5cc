"""Latents in two styles that are made up: the same smooth contents under a checkerboard or under waves."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

NUM_STYLES = 2
STRENGTH = 0.7


def make_latents(num_per_style: int, size: int, channels: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Latents `(2 * num_per_style, channels, size, size)`, no two of one content, and their style ids, `(...,)`."""
    contents = make_contents(NUM_STYLES * num_per_style, size, channels, generator)
    styles = torch.arange(NUM_STYLES).repeat_interleave(num_per_style)
    return in_style(contents, styles, generator), styles


def make_contents(num: int, size: int, channels: int, generator: torch.Generator) -> Tensor:
    """Smooth fields, `(num, channels, size, size)`; each channel of each has mean 0 and variance 1."""
    coarse = torch.randn(num, channels, 4, 4, generator=generator)
    smooth = F.interpolate(coarse, size=(size, size), mode="bicubic", align_corners=True)
    centred = smooth - smooth.mean(dim=(2, 3), keepdim=True)
    return centred / centred.std(dim=(2, 3), keepdim=True)


def in_style(contents: Tensor, styles: Tensor, generator: torch.Generator) -> Tensor:
    """Contents with the texture of each one's style on them, in a phase that is drawn for each."""
    num, channels, size, _ = contents.shape
    checks, waves = (pattern(num, size, generator) for pattern in (_checkerboards, _waves))
    colours = torch.tensor([[1.0, -1.0, 0.5, 0.0], [0.0, 0.5, 1.0, -1.0]])[:, torch.arange(channels) % 4]
    chosen = torch.where(styles.view(-1, 1, 1) == 0, checks, waves)
    return contents + STRENGTH * chosen[:, None] * colours[styles][:, :, None, None]


def _checkerboards(num: int, size: int, generator: torch.Generator) -> Tensor:
    """Fields of squares of two by two, `(num, size, size)`, of unit variance."""
    shift = torch.randint(4, (num, 2, 1), generator=generator)
    rows, columns = ((torch.arange(size) + shift[:, axis]) // 2 for axis in (0, 1))
    return 1.0 - 2.0 * ((rows[:, :, None] + columns[:, None, :]) % 2)


def _waves(num: int, size: int, generator: torch.Generator) -> Tensor:
    """Waves of eight positions along the diagonal, `(num, size, size)`, of unit variance."""
    phase = 2 * math.pi * torch.rand(num, 1, 1, generator=generator)
    along = (torch.arange(size)[:, None] + torch.arange(size)[None, :]) / math.sqrt(2)
    return math.sqrt(2) * torch.sin(2 * math.pi / 8 * along + phase)
