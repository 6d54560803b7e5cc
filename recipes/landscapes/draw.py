"""Draws small landscapes in two styles: painted in shaded colours, or in ink, where hatching tells things apart.

A landscape has sky and sun, ground, houses and trees, in places that random numbers decide.
"""

import random

import numpy as np
from PIL import Image, ImageDraw

STRIDE = 4  # after so many pixels hatching repeats: each latent of an autoencoder with this stride sees the same
_FINER = 4  # things are laid out in so many times the pixels

# Red, green and blue from 0 to 255, and the ink of STRIDE x STRIDE pixels.
_MATERIALS = {
    "sky": ((135, 190, 240), ("....", "....", "....", "....")),
    "sun": ((255, 215, 70), ("#...", "....", "..#.", "....")),
    "ground": ((110, 175, 80), ("####", "....", "....", "....")),
    "wall": ((205, 145, 95), ("#...", "#...", "#...", "#...")),
    "roof": ((185, 60, 45), ("####", "#.#.", "####", "#.#.")),
    "crown": ((35, 105, 60), ("#..#", "..##", ".##.", "##..")),
    "trunk": ((95, 60, 35), ("####", "####", "####", "####")),
}
_NUMBER = {name: number for number, name in enumerate(_MATERIALS)}
_COLOURS = np.array([colour for colour, _ in _MATERIALS.values()], dtype=np.float32)
_INK = np.array([[[mark == "#" for mark in row] for row in rows] for _, rows in _MATERIALS.values()])
_COLOUR_SPREAD = 14.0  # standard deviation of an image's colours
_LIGHT = (1.12, 0.88)  # at the top and at the bottom
_PAPER, _INK_COLOUR = np.array((250, 246, 235)), np.array((30, 30, 45))


def landscape(size: tuple[int, int], numbers: random.Random) -> Image.Image:
    """Return which material is where, for images of `size` (width, height) in pixels."""
    width, height = (side * _FINER for side in size)
    unit = min(width, height)
    scene = Image.new("L", (width, height), _NUMBER["sky"])
    draw = ImageDraw.Draw(scene)
    horizon = numbers.uniform(0.5, 0.65) * height
    radius = numbers.uniform(0.07, 0.11) * unit
    x, y = numbers.uniform(0.15, 0.85) * width, numbers.uniform(0.13, 0.25) * height
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_NUMBER["sun"])
    slope = numbers.uniform(-0.05, 0.05) * unit
    draw.polygon([(0, horizon), (width, horizon + slope), (width, height), (0, height)], fill=_NUMBER["ground"])
    things = [_house, _tree, *numbers.choices((_house, _tree), k=numbers.randrange(2))]
    for thing, place in zip(things, numbers.sample((0.2, 0.5, 0.8), len(things)), strict=True):
        foot = horizon + numbers.uniform(0.06, 0.24) * unit
        thing(draw, (place + numbers.uniform(-0.05, 0.05)) * width, foot, numbers.uniform(0.24, 0.34) * unit)
    return scene


def _house(draw: ImageDraw.ImageDraw, x: float, foot: float, size: float) -> None:
    half, eaves = size / 2, foot - 0.7 * size
    draw.rectangle((x - half, eaves, x + half, foot), fill=_NUMBER["wall"])
    draw.polygon([(x - 1.3 * half, eaves), (x, eaves - 0.6 * size), (x + 1.3 * half, eaves)], fill=_NUMBER["roof"])


def _tree(draw: ImageDraw.ImageDraw, x: float, foot: float, size: float) -> None:
    draw.rectangle((x - 0.12 * size, foot - 0.6 * size, x + 0.12 * size, foot), fill=_NUMBER["trunk"])
    top, half = foot - 1.4 * size, 0.48 * size
    draw.ellipse((x - half, top, x + half, top + 2 * half), fill=_NUMBER["crown"])


def painted(scene: Image.Image, numbers: random.Random) -> Image.Image:
    materials = np.asarray(scene)
    spread = np.array([[numbers.gauss(0, _COLOUR_SPREAD) for _ in range(3)] for _ in _MATERIALS], dtype=np.float32)
    light = np.linspace(*_LIGHT, len(materials), dtype=np.float32)[:, None, None]
    colours = ((_COLOURS + spread)[materials] * light).clip(0, 255).astype(np.uint8)
    return Image.fromarray(colours).reduce(_FINER)


def in_ink(scene: Image.Image) -> Image.Image:
    materials = np.asarray(scene)[_FINER // 2 :: _FINER, _FINER // 2 :: _FINER]
    rows, columns = np.indices(materials.shape) % STRIDE
    ink = _INK[materials, rows, columns]
    ink[1:] |= materials[1:] != materials[:-1]
    ink[:, 1:] |= materials[:, 1:] != materials[:, :-1]
    return Image.fromarray(np.where(ink[..., None], _INK_COLOUR, _PAPER).astype(np.uint8))
