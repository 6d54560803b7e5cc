"""Which part of its data sheet a card reaches in training, and how far from the truth predicted times were.

All figures are fitted to published training steps: `python -m benchmarks.published.fit` prints them, and
docs/published_measurements.md says how.
"""

from typing import NamedTuple

from hf_memopt.planning.cards.gpus import Card


class KernelSpeeds(NamedTuple):
    """Shares of a data sheet's figures. They may exceed 1, since cards may clock higher than it says."""

    half: float  # of products of matrices on tensor cores, in 16 bits
    tf32: float  # the same in TF32
    float32: float  # of products of matrices in float32
    convolution: float  # in any precision
    attention: float  # of fused attention's products
    memory: float  # of the bandwidth of memory


class TimeRange(NamedTuple):
    """The range of nine in ten steps that others have measured, as multiples of the prediction."""

    low: float
    high: float


# By family: Volta, Turing, A100 and such, Ampere and Ada with tensor cores at full and at half rate, Hopper.
_FAMILIES = {
    "V100": KernelSpeeds(0.81, 0.71, 0.76, 0.79, 0.54, 0.47),
    "Turing": KernelSpeeds(0.56, 0.71, 0.74, 0.63, 0.53, 0.50),
    "A100": KernelSpeeds(0.86, 0.75, 0.75, 0.47, 0.60, 0.45),
    "Ampere and Ada, workstation": KernelSpeeds(0.85, 0.62, 0.75, 0.45, 0.57, 0.59),
    "Ampere and Ada, GeForce": KernelSpeeds(1.00, 0.75, 0.75, 0.55, 0.54, 0.69),
    "Hopper": KernelSpeeds(0.87, 0.79, 0.75, 0.43, 0.54, 0.48),
}
# For other cards.
_ALL = KernelSpeeds(0.80, 0.71, 0.75, 0.53, 0.54, 0.53)
# By fits to other models on such cards; by fits without all cards of the family, but no narrower.
_OF_FAMILY, _OF_OTHERS = TimeRange(0.86, 1.43), TimeRange(0.72, 1.43)

_BY_CAPABILITY = {(7, 0): "V100", (7, 5): "Turing", (8, 0): "A100", (9, 0): "Hopper"}
_CONSUMER_CAPABILITIES = ((8, 6), (8, 9))

# The fixed time of a kernel, and the time of the host to start an operation: Python, autograd, the dispatcher.
KERNEL_S = 1.6e-6
HOST_S = 27.8e-6
# The share of `HOST_S` that a view takes, and an operation that autograd starts in backward (assumed).
VIEW_SHARE, BACKWARD_SHARE = 0.3, 0.6


def family_of(card: Card) -> str | None:
    """Return the family that a card belongs to; None: no step on a card like it was fitted.

    Of Ampere and Ada, cards for players multiply at half the rate where sums are kept in float32.
    """
    if card.compute_capability in _CONSUMER_CAPABILITIES:
        rate = "GeForce" if card.half_flops < 2.5 * card.float32_flops else "workstation"
        return f"Ampere and Ada, {rate}"
    return _BY_CAPABILITY.get(card.compute_capability)


def speeds_of(card: Card) -> KernelSpeeds:
    family = family_of(card)
    return _ALL if family is None else _FAMILIES[family]


def time_range(card: Card) -> TimeRange:
    return _OF_OTHERS if family_of(card) is None else _OF_FAMILY
