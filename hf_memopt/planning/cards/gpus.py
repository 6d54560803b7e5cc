"""Graphics cards by name or by size, the memory that a card keeps for itself, and its speed in training.

A card reaches a part of its data sheet, and predicted times are some way from the truth. Both were fitted to published
training steps (benchmarks/published/measured): docs/published_measurements.md says how well, docs/LOG.md how.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from hf_memopt.units import GIB, KIB, MIB, parse_size

# CUDA's context, where it was not measured.
_CONTEXT_BYTES = 512 * MIB


@dataclass(frozen=True)
class Card:
    """The properties of a device that a plan needs."""

    name: str  # as in `CARDS`, or a size
    memory_bytes: int  # as CUDA reports it: less than the data sheet says
    float32_flops: float  # multiplications in float32 per second
    half_flops: float  # dense multiplications in bfloat16 or float16 per second, accumulated in float32
    memory_bytes_per_s: float  # bandwidth of the device's memory
    link_bytes_per_s: float  # bandwidth to the host's memory, in each direction
    compute_capability: tuple[int, int] = (8, 9)  # by which torch chooses kernels; that of most desktop cards
    context_bytes: int = _CONTEXT_BYTES  # the part of `memory_bytes` that CUDA's context takes for itself
    reserved_bytes: int = 0  # the part that other programs take, such as a desktop
    # False where only a size is known. No time is predicted then: plans rank candidates by the speeds of the rtx4070.
    is_named: bool = True


# MiB of memory, float32 and half-precision TFLOPS, GB/s of memory and of the link, and compute capability.
#
# Memory is the smallest figure that torch was found to report (`total_memory`, or "total capacity" of an error): 1 to
# 8 % below the data sheet, which error correction and the driver take. Repositories are named where users have shown
# it there; the others are from logs, and the rtx3070, rtx4060, rtx4060ti, rtx4080, rtx50 cards below the rtx5090, and
# the a40 have the figure of another card of their size. The rest is from the vendors' data sheets; links at 80 % of the
# PCIe generation and width. The gb10 has no link: a copy within its memory reads and writes it.
_FIGURES = {
    "v100-16gb": (16144, 15.7, 125, 900, 12.6, (7, 0)),
    "v100-32gb": (32502, 15.7, 125, 900, 12.6, (7, 0)),  # liucongg/ChatGLM-Finetuning#73: 31.74 GiB
    "t4": (14912, 8.1, 65, 320, 12.6, (7, 5)),  # fitcheck-llm 0.3.1, data/measurements
    "rtx2080ti": (11018, 13.4, 53.8, 616, 12.6, (7, 5)),  # JDAI-CV/image-captioning#11: 10.76 GiB
    "rtx3060-12gb": (11931, 12.7, 25.5, 360, 25, (8, 6)),
    "rtx3060ti": (7967, 16.2, 32.4, 448, 25, (8, 6)),
    "rtx3070": (7967, 20.3, 40.6, 448, 25, (8, 6)),
    "rtx3080-10gb": (10004, 29.8, 59.5, 760, 25, (8, 6)),
    "rtx3090": (24248, 35.6, 71, 936, 25, (8, 6)),  # 3DTopia/OpenLRM#42: 23.68 GiB
    "rtx4060": (7936, 15.1, 30, 272, 12.6, (8, 9)),
    "rtx4060ti-8gb": (7936, 22.1, 44, 288, 12.6, (8, 9)),
    "rtx4060ti-16gb": (15934, 22.1, 44, 288, 12.6, (8, 9)),
    "rtx4070-laptop": (7936, 15.6, 31, 256, 12.6, (8, 9)),  # ESRSchao/EdgeRegNet#2: 7.75 GiB, of an RTX 4060 Laptop
    "rtx4070": (11981, 29.1, 58, 504, 25, (8, 9)),  # Kwai-Kolors/Kolors#11: 11.70 GiB, of a 4070 Ti
    "rtx4070ti-super": (15934, 44.1, 88, 672, 25, (8, 9)),
    "rtx4080": (15934, 48.7, 97.5, 717, 25, (8, 9)),
    "rtx4090": (24064, 82.6, 165, 1008, 25, (8, 9)),
    "rtx5070": (11931, 30.9, 61.7, 672, 50, (12, 0)),
    "rtx5070ti": (15934, 43.9, 87.9, 896, 50, (12, 0)),
    "rtx5080": (15934, 56.3, 112.6, 960, 50, (12, 0)),
    "rtx5090": (32112, 104.8, 210, 1792, 50, (12, 0)),
    "a10": (22518, 31.2, 125, 600, 25, (8, 6)),  # zai-org/CogVLM#236: 21.99 GiB
    "a30": (24094, 10.3, 165, 933, 25, (8, 0)),  # google/RB-Modulation#5: 23.53 GiB
    "a10g": (22559, 31.5, 70, 600, 25, (8, 6)),
    "a40": (45466, 37.4, 149.7, 696, 25, (8, 6)),
    "a6000": (48671, 38.7, 155, 768, 25, (8, 6)),  # black-forest-labs/flux2#23: 47.53 GiB
    "l4": (22559, 30.3, 121, 300, 25, (8, 9)),
    "l40s": (45466, 91.6, 362, 864, 25, (8, 9)),  # QwenLM/Qwen3-VL#2097: 44.40 GiB
    "rtx6000-ada": (48622, 91.1, 364, 960, 25, (8, 9)),
    "a100-40gb": (40325, 19.5, 312, 1555, 25, (8, 0)),
    "a100-80gb": (81050, 19.5, 312, 2039, 25, (8, 0)),
    "h100": (80998, 67, 989, 3350, 50, (9, 0)),
    "h100-nvl": (95232, 60, 835, 3900, 50, (9, 0)),  # ali-vilab/VACE#56: 93.00 GiB
    "h20": (97280, 44, 148, 4000, 50, (9, 0)),  # modelscope/DiffSynth-Studio#1238: 95.00 GiB
    "h200": (143073, 67, 989, 4800, 50, (9, 0)),
    "b200": (182631, 75, 2250, 8000, 50, (10, 0)),
    "rtx-pro-6000": (97249, 125, 504, 1792, 50, (12, 0)),  # 94.97 GiB
    "gb10": (122548, 31, 125, 273, 136, (12, 1)),  # leptonai/gpud#1170: 128,501,256,192 bytes
    "mi300x": (196552, 163.4, 1307, 5300, 50, (9, 4)),  # ROCm/hipBLASLt#1539: 206.1 GB
}

CARDS = {
    name: Card(name, mib * MIB, single * 1e12, half * 1e12, memory * 1e9, link * 1e9, capability)
    for name, (mib, single, half, memory, link, capability) in _FIGURES.items()
}
# Measured contexts, in MiB.
for _name, _mib in {"t4": 141, "rtx3090": 300, "rtx5090": 498, "rtx6000-ada": 426}.items():
    CARDS[_name] = replace(CARDS[_name], context_bytes=_mib * MIB)

# Advertised sizes in GB, each with the card whose memory it stands for.
_SOLD_WITH_GB = {
    8: "rtx4060",
    10: "rtx3080-10gb",
    11: "rtx2080ti",
    12: "rtx4070",
    16: "rtx4080",
    24: "rtx4090",
    32: "rtx5090",
    40: "a100-40gb",
    48: "a6000",
    80: "a100-80gb",
    94: "h100-nvl",
    96: "rtx-pro-6000",
    141: "h200",
    180: "b200",
}
# Least share of its advertised size that a card of another size reports.
_LEAST_SHARE = 0.968

# Bytes depend on the card through attention's kernels and cuBLAS's workspaces alone.
DEFAULT_CARD = CARDS["rtx4070"]

# cuBLAS's workspace in torch 2.11, by major compute capability: `parseChosenWorkspaceSize` of CublasHandlePool.cpp.
_LARGE_WORKSPACE_BYTES, _WORKSPACE_BYTES = 32 * MIB, 8320 * KIB
_LARGE_WORKSPACE_MAJORS = (9, 10, 12)
_OTHER_WORKSPACES_BYTES = 112 * MIB


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    return _LARGE_WORKSPACE_BYTES if compute_capability[0] in _LARGE_WORKSPACE_MAJORS else _WORKSPACE_BYTES


# One communicator takes 544 MB between two A100 and 688 MB among more (NVIDIA/nccl#964), and 1.6 GB elsewhere (#864);
# engines may have more than one.
_NCCL_BYTES = (544 * 10**6, 2 * GIB)


def nccl_bytes(num_gpus: int) -> tuple[int, int]:
    """Return the least and the most device memory that NCCL may take for itself; none for one GPU."""
    return _NCCL_BYTES if num_gpus > 1 else (0, 0)


def allowances(card: Card | None = None) -> dict[str, int]:
    """Return the memory that no simulation counts, by name, in bytes.

    Assumed: cuDNN's workspaces depend on which kernels run, and may be far larger with
    `torch.backends.cudnn.benchmark`. The context was measured on few cards, and depends on the driver.
    """
    context_bytes = _CONTEXT_BYTES if card is None else card.context_bytes
    kept = {"device context": context_bytes, "cuDNN and other workspaces": _OTHER_WORKSPACES_BYTES}
    return kept | ({"other programs": card.reserved_bytes} if card is not None and card.reserved_bytes else {})


def find_card(gpu: str | Card, *, link: str | None = None, reserve: str | None = None) -> Card:
    """Return a card by its name or its size.

    Args:
        gpu: a name ("rtx4070-laptop", "RTX 4090", "4090", "NVIDIA A100 80GB PCIe"), of which "A100" alone is the one
            with the least memory; a size as cards are sold ("24GB"), which has the memory that such a card reports; an
            exact size ("8GiB"), as CUDA would report it; or a size with the speed of a named card ("48GiB@l40s").
        link: bandwidth to host memory, such as "12GBps"; by default that of the card.
        reserve: memory that other programs take, such as "1GiB" for a desktop; by default that of a `Card`, else 0.

    Raises:
        ValueError: `gpu` is none of these, and names the nearest card; or another text is no size.
    """
    card = gpu if isinstance(gpu, Card) else _card_from(gpu)
    if link is not None:
        card = replace(card, link_bytes_per_s=parse_size(link, "link"))
    return card if reserve is None else replace(card, reserved_bytes=parse_size(reserve, "reserve"))


def card_named(name: str) -> Card | None:
    words, sizes = _words_and_sizes(name)
    found = _named(words, sizes)
    if found is None and not sizes and len(words) > 1 and words[-1].isdigit():  # "A100 80"
        return _named(words[:-1], [int(words[-1])])
    return found


def _words_and_sizes(name: str) -> tuple[list[str], list[int]]:
    """Return the words of a name that tell cards apart, and the GB in it."""
    words = [word for word in re.findall(r"[a-z0-9]+", name.lower()) if not _UNNAMED.fullmatch(word)]
    sizes = [word for word in words if re.fullmatch(r"\d+gb", word)]
    return [word for word in words if word not in sizes], [int(size.removesuffix("gb")) for size in sizes]


def _named(words: list[str], sizes: list[int]) -> Card | None:
    named = [card for card in CARDS.values() if "".join(words) in _names(card)]
    # Cards report up to an eighth less than the size that they are sold with.
    fitting = [card for card in named if all(7 / 8 * size < card.memory_bytes / GIB < size for size in sizes)]
    return min(fitting, key=lambda card: card.memory_bytes, default=None)


# Words of drivers' names that tell no cards apart.
_UNNAMED = re.compile(
    r"nvidia|geforce|tesla|quadro|amd|instinct|gpu|generation|graphics|blackwell|server|workstation|edition|pcie|sxm\d?|"
    r"hbm\d?e?"
)


def _names(card: Card) -> Iterator[str]:
    plain = re.sub(r"-\d+gb$", "", card.name).replace("-", "")
    yield plain
    yield plain.removeprefix("rtx")
    yield f"rtx{plain}"


def _card_from(text: str) -> Card:
    size, at, like = text.partition("@")
    if not at and (card := card_named(text)) is not None:
        return card
    speed = card_named(like) if at else DEFAULT_CARD
    try:
        if size.strip().isdigit() or speed is None:
            raise ValueError
        return replace(
            speed, name=text.strip(), memory_bytes=_memory_bytes(size), context_bytes=_CONTEXT_BYTES, is_named=bool(at)
        )
    except ValueError:
        raise ValueError(
            f"gpu={text!r} is neither a size with its unit such as 8GiB, nor a size and a card's speed such as "
            f"48GiB@l40s, nor a known card; {_advice(text)}"
        ) from None


def _memory_bytes(size: str) -> int:
    """Return the bytes that a card of a size reports; GiB, MiB and such are exact."""
    num_bytes = parse_size(size)
    if "i" in size.lower():
        return num_bytes
    gigabytes = num_bytes / 10**9
    if gigabytes in _SOLD_WITH_GB:
        return CARDS[_SOLD_WITH_GB[int(gigabytes)]].memory_bytes
    return round(_LEAST_SHARE * gigabytes * GIB)


def _advice(text: str) -> str:
    several = re.fullmatch(r"\s*(\d+)\s*[x*]\s*(.+)", text)
    if several and card_named(several[2]):
        return f"for several GPUs give num_gpus={several[1]} and gpu={several[2]!r}"
    nearest = _nearest(text.rpartition("@")[2])
    return f"{f'the nearest is {nearest}; ' if nearest else ''}known are {', '.join(CARDS)}"


# Least similarity of an unknown name to the nearest one.
_LEAST_ALIKE = 0.5


def _nearest(text: str) -> str | None:
    """Return the known card that is nearest to an unknown one: of its series by generation and memory, then by name."""
    words, sizes = _words_and_sizes(text)
    wanted = "".join(words)
    series, generation, number = _model_of(wanted)

    def distance(card: Card) -> tuple[float, ...]:
        name = next(_names(card))
        its_series, its_generation, its_number = _model_of(name)
        memory = sum(abs(card.memory_bytes / GIB - size) for size in sizes)
        alike = difflib.SequenceMatcher(None, wanted, name).ratio()
        return its_series != series, abs(its_generation - generation), memory, abs(its_number - number), -alike

    nearest = min(CARDS.values(), key=distance)
    is_of_another, *_, unlike = distance(nearest)
    return None if is_of_another or -unlike < _LEAST_ALIKE else nearest.name


def _model_of(name: str) -> tuple[str, int, int]:
    """Return a model's series, and of GeForce cards the generation and the number in it: ("rtx", 40, 70)."""
    found = re.match(r"(?:rtx|gtx)?(\d0)([1-9]0)(?!\d)", name)
    if found:
        return "geforce", int(found[1]), int(found[2])
    return re.sub(r"\d.*", "", name), 0, 0


# ------------------------------------------------------------------------------------------------- speeds in training


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


class _Family(NamedTuple):
    speeds: KernelSpeeds
    times: TimeRange  # of steps of other models on such cards


# Volta, Turing, A100 and such, Ampere and Ada with tensor cores at full and at half rate, Hopper.
_FAMILIES = {
    "V100": _Family(KernelSpeeds(0.81, 0.71, 0.76, 0.79, 0.54, 0.47), TimeRange(0.83, 1.16)),
    "Turing": _Family(KernelSpeeds(0.56, 0.71, 0.74, 0.63, 0.53, 0.50), TimeRange(0.86, 1.27)),
    "A100": _Family(KernelSpeeds(0.98, 0.67, 0.75, 0.38, 0.68, 0.51), TimeRange(0.83, 1.37)),
    "Ampere and Ada, workstation": _Family(KernelSpeeds(0.85, 0.62, 0.75, 0.45, 0.54, 0.58), TimeRange(0.76, 1.22)),
    "Ampere and Ada, GeForce": _Family(KernelSpeeds(1.02, 0.75, 0.75, 0.56, 0.56, 0.69), TimeRange(0.88, 1.14)),
    "Hopper": _Family(KernelSpeeds(0.87, 0.79, 0.75, 0.43, 0.54, 0.48), TimeRange(0.91, 1.48)),
}
# For other cards; the range is that of fits without all cards of a family, but no narrower than theirs.
_OTHERS = _Family(KernelSpeeds(0.80, 0.71, 0.75, 0.53, 0.54, 0.53), TimeRange(0.72, 1.48))

_BY_CAPABILITY = {(7, 0): "V100", (7, 5): "Turing", (8, 0): "A100", (9, 0): "Hopper"}
_CONSUMER_CAPABILITIES = ((8, 6), (8, 9))

# The fixed time of a kernel, and the time of the host to start an operation: Python, autograd, the dispatcher.
KERNEL_S = 1.6e-6
HOST_S = 27.8e-6
# The share of `HOST_S` that a view takes, and an operation that autograd starts in backward (assumed).
VIEW_SHARE, BACKWARD_SHARE = 0.3, 0.6


def family_of(card: Card) -> str | None:
    """Return the family that a card belongs to, or None where no step on a card like it was fitted.

    Of Ampere and Ada, cards for players multiply at half the rate where sums are kept in float32.
    """
    if card.compute_capability in _CONSUMER_CAPABILITIES:
        rate = "GeForce" if card.half_flops < 2.5 * card.float32_flops else "workstation"
        return f"Ampere and Ada, {rate}"
    return _BY_CAPABILITY.get(card.compute_capability)


def speeds_of(card: Card) -> KernelSpeeds:
    return _fitted(card).speeds


def time_range(card: Card) -> TimeRange:
    return _fitted(card).times


def _fitted(card: Card) -> _Family:
    family = family_of(card)
    return _OTHERS if family is None else _FAMILIES[family]
