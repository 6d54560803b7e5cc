"""Graphics cards by name, and what a card keeps for itself."""

import re
from dataclasses import dataclass, replace

from hf_memopt.units import GIB, KIB, MIB

# Where no card is named: that of the desktop cards that are most common.
DEFAULT_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Card:
    """What a plan needs to know of a device.

    Attributes:
        name: as in `CARDS`, or "custom".
        memory_bytes: of the device.
        float32_flops: of multiplications in float32, per second.
        half_flops: of dense multiplications in bfloat16 or float16, accumulated in float32.
        memory_bytes_per_s: bandwidth of the device's memory.
        link_bytes_per_s: bandwidth to the host's memory, in each direction.
        compute_capability: major and minor, by which torch chooses kernels.
    """

    name: str
    memory_bytes: int
    float32_flops: float
    half_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    compute_capability: tuple[int, int] = DEFAULT_CAPABILITY


# GiB of memory, float32 and half-precision TFLOPS, GB/s of memory and of the link, and compute capability. From the
# vendor's data sheets; links at 80 % of what the PCIe generation and width give.
_DATA_SHEETS = {
    "t4": (15, 8.1, 65, 320, 12.6, (7, 5)),
    "rtx3060-12gb": (12, 12.7, 25.5, 360, 25, (8, 6)),
    "rtx3080-10gb": (10, 29.8, 59.5, 760, 25, (8, 6)),
    "rtx3090": (24, 35.6, 71, 936, 25, (8, 6)),
    "rtx4060ti-16gb": (16, 22.1, 44, 288, 12.6, (8, 9)),
    "rtx4070-laptop": (8, 15.6, 31, 256, 12.6, (8, 9)),
    "rtx4070": (12, 29.1, 58, 504, 25, (8, 9)),
    "rtx4080": (16, 48.7, 97.5, 717, 25, (8, 9)),
    "rtx4090": (24, 82.6, 165, 1008, 25, (8, 9)),
    "rtx5090": (32, 104.8, 210, 1792, 50, (12, 0)),
    "a10": (24, 31.2, 125, 600, 25, (8, 6)),
    "l4": (24, 30.3, 121, 300, 25, (8, 9)),
    "a100-40gb": (40, 19.5, 312, 1555, 25, (8, 0)),
    "a100-80gb": (80, 19.5, 312, 2039, 25, (8, 0)),
    "h100": (80, 67, 989, 3350, 50, (9, 0)),
    "h200": (141, 67, 989, 4800, 50, (9, 0)),
}
CARDS = {
    name: Card(name, round(gib * GIB), single * 1e12, half * 1e12, memory * 1e9, link * 1e9, compute_capability)
    for name, (gib, single, half, memory, link, compute_capability) in _DATA_SHEETS.items()
}

# What a simulation goes by where no card is named. Bytes depend on it through the kernels of attention alone.
DEFAULT_CARD = CARDS["rtx4070"]

# cuBLAS's workspace in torch 2.11, by major compute capability: `parseChosenWorkspaceSize` of CublasHandlePool.cpp.
# Each handle and stream has one, and autograd's thread has a handle of its own.
_LARGE_WORKSPACE_BYTES, _WORKSPACE_BYTES = 32 * MIB, 8320 * KIB
_LARGE_WORKSPACE_MAJORS = (9, 10, 12)
_NUM_HANDLES = 2
_OTHER_WORKSPACES_BYTES = 128 * MIB - _NUM_HANDLES * _WORKSPACE_BYTES


def allowances(card: Card | None = None) -> dict[str, int]:
    """Return the memory that is not tensors, by name, in bytes. None stands for a card that nothing is known of.

    Assumed, not measured: the context depends on driver and card, cuDNN's workspaces on which kernels run. Those of
    convolutions may be far larger with `torch.backends.cudnn.benchmark`.
    """
    major, _ = DEFAULT_CAPABILITY if card is None else card.compute_capability
    cublas_bytes = _LARGE_WORKSPACE_BYTES if major in _LARGE_WORKSPACE_MAJORS else _WORKSPACE_BYTES
    return {
        "device context": 512 * MIB,
        "cuBLAS and cuDNN workspaces": _NUM_HANDLES * cublas_bytes + _OTHER_WORKSPACES_BYTES,
    }


def find_card(gpu: str | Card, link_bytes_per_s: float | None = None) -> Card:
    """Return a card by its name ("rtx4070-laptop"), or one of a size ("8GiB") with the speed of a small desktop card.

    Args:
        gpu: a name or a size; a `Card` is returned as it is.
        link_bytes_per_s: bandwidth to the host's memory in place of the card's own.

    Raises:
        ValueError: neither a known name nor a size.
    """
    card = gpu if isinstance(gpu, Card) else CARDS.get(gpu.strip().lower()) or _card_of_size(gpu)
    return card if link_bytes_per_s is None else replace(card, link_bytes_per_s=link_bytes_per_s)


def _card_of_size(text: str) -> Card:
    try:
        return replace(DEFAULT_CARD, name=text.strip(), memory_bytes=parse_size(text))
    except ValueError:
        known = ", ".join(CARDS)
        raise ValueError(f"gpu={text!r} is neither a size such as 8GiB nor a known card; known are {known}") from None


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str, option: str = "size") -> int:
    """Return the bytes of "8GiB", "24 GB", "500MB", and of "12GBps" per second.

    Args:
        text: as above.
        option: that it was given for.

    Raises:
        ValueError: not of this form, or not positive.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?(ps|/s)?\s*", text.lower())
    num_bytes = round(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
    if num_bytes <= 0:
        raise ValueError(f"{option}={text!r} is not a size; write, for instance, 8GiB, 24GB, or 12GBps for a link")
    return num_bytes
