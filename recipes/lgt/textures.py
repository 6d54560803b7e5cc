"""Latents in two styles that are made up: the same smooth contents under grain or under a tint."""

import torch
from torch import Tensor
from torch.nn import functional as F

NUM_STYLES = 2
STRENGTH = 0.7
_COLOURS = ((1.0, -1.0, 0.5, 0.0), (0.5, 0.5, -1.0, 1.0))  # of the styles, repeated where there are more channels


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
    """Contents with the texture of each one's style on them: noise of one colour, or another colour evenly."""
    num, channels, height, width = contents.shape
    grain = torch.randn(num, height, width, generator=generator)
    texture = torch.where(styles.view(-1, 1, 1) == 0, grain, torch.ones(()))
    colours = torch.tensor(_COLOURS)[:, torch.arange(channels) % 4]
    return contents + STRENGTH * texture[:, None] * colours[styles][:, :, None, None]
