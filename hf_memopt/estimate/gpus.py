"""Graphics cards by name, and the memory that a card keeps for itself."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hf_memopt.units import GIB, KIB, MIB

# CUDA's context, where it was not measured.
_CONTEXT_BYTES = 512 * MIB


@dataclass(frozen=True)
class Card:
    """The properties of a device that a plan needs.

    Attributes:
        name: as in `CARDS`, or a size.
        memory_bytes: as CUDA reports it: less than the data sheet says.
        float32_flops: multiplications in float32 per second.
        half_flops: dense multiplications in bfloat16 or float16 per second, accumulated in float32.
        memory_bytes_per_s: bandwidth of the device's memory.
        link_bytes_per_s: bandwidth to the host's memory, in each direction.
        compute_capability: major and minor, by which torch chooses kernels; by default that of most desktop cards.
        context_bytes: the part of `memory_bytes` that CUDA's context takes for itself.
    """

    name: str
    memory_bytes: int
    float32_flops: float
    half_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    compute_capability: tuple[int, int] = (8, 9)
    context_bytes: int = _CONTEXT_BYTES


# MiB of memory, float32 and half-precision TFLOPS, GB/s of memory and of the link, and compute capability.
#
# Memory is the smallest figure that torch was found to report (`total_memory`, or "total capacity" of an error): 1 to
# 8 % below the data sheet, which error correction and the driver take. Repositories are named where users have shown
# it there; the others are from logs, and rtx4080 and rtx4060ti-16gb have the figure of another card of their size. The
# rest is from the vendors' data sheets; links at 80 % of the PCIe generation and width.
_FIGURES = {
    "v100-16gb": (16144, 15.7, 125, 900, 12.6, (7, 0)),
    "v100-32gb": (32502, 15.7, 125, 900, 12.6, (7, 0)),  # liucongg/ChatGLM-Finetuning#73: 31.74 GiB
    "t4": (14912, 8.1, 65, 320, 12.6, (7, 5)),  # fitcheck-llm 0.3.1, data/measurements
    "rtx3060-12gb": (11931, 12.7, 25.5, 360, 25, (8, 6)),
    "rtx3060ti": (7967, 16.2, 32.4, 448, 25, (8, 6)),
    "rtx3080-10gb": (10004, 29.8, 59.5, 760, 25, (8, 6)),
    "rtx3090": (24248, 35.6, 71, 936, 25, (8, 6)),  # 3DTopia/OpenLRM#42: 23.68 GiB
    "rtx4060ti-16gb": (15934, 22.1, 44, 288, 12.6, (8, 9)),
    "rtx4070-laptop": (7936, 15.6, 31, 256, 12.6, (8, 9)),  # ESRSchao/EdgeRegNet#2: 7.75 GiB, of an RTX 4060 Laptop
    "rtx4070": (11981, 29.1, 58, 504, 25, (8, 9)),  # Kwai-Kolors/Kolors#11: 11.70 GiB, of a 4070 Ti
    "rtx4070ti-super": (15934, 44.1, 88, 672, 25, (8, 9)),
    "rtx4080": (15934, 48.7, 97.5, 717, 25, (8, 9)),
    "rtx4090": (24064, 82.6, 165, 1008, 25, (8, 9)),
    "rtx5090": (32112, 104.8, 210, 1792, 50, (12, 0)),
    "a10": (22518, 31.2, 125, 600, 25, (8, 6)),  # zai-org/CogVLM#236: 21.99 GiB
    "a10g": (22559, 31.5, 70, 600, 25, (8, 6)),
    "a6000": (48671, 38.7, 155, 768, 25, (8, 6)),  # black-forest-labs/flux2#23: 47.53 GiB
    "l4": (22559, 30.3, 121, 300, 25, (8, 9)),
    "l40s": (45466, 91.6, 362, 864, 25, (8, 9)),  # QwenLM/Qwen3-VL#2097: 44.40 GiB
    "rtx6000-ada": (48622, 91.1, 364, 960, 25, (8, 9)),
    "a100-40gb": (40325, 19.5, 312, 1555, 25, (8, 0)),
    "a100-80gb": (81050, 19.5, 312, 2039, 25, (8, 0)),
    "h100": (80998, 67, 989, 3350, 50, (9, 0)),
    "h200": (143073, 67, 989, 4800, 50, (9, 0)),
    "b200": (182631, 75, 2250, 8000, 50, (10, 0)),
}

CARDS = {
    name: Card(name, mib * MIB, single * 1e12, half * 1e12, memory * 1e9, link * 1e9, capability)
    for name, (mib, single, half, memory, link, capability) in _FIGURES.items()
}
# Measured contexts, in MiB.
for _name, _mib in {"t4": 141, "rtx3090": 300, "rtx5090": 498, "rtx6000-ada": 426}.items():
    CARDS[_name] = replace(CARDS[_name], context_bytes=_mib * MIB)

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
    return {"device context": context_bytes, "cuDNN and other workspaces": _OTHER_WORKSPACES_BYTES}


def find_card(gpu: str | Card, link_bytes_per_s: float | None = None) -> Card:
    """Return a card by its name, or one of a size with the speed of a small desktop card or of a named one.

    `gpu` is a name ("rtx4070-laptop", "RTX 4090", "4090", "NVIDIA A100 80GB PCIe"), of which "A100" alone is the one
    with the least memory; a size ("8GiB"), as CUDA would report it; or a size with another's speed ("48GiB@l40s").
    """
    card = gpu if isinstance(gpu, Card) else _card_from(gpu)
    return card if link_bytes_per_s is None else replace(card, link_bytes_per_s=link_bytes_per_s)


def card_named(name: str) -> Card | None:
    words = [word for word in re.findall(r"[a-z0-9]+", name.lower()) if not _UNNAMED.fullmatch(word)]
    sizes = [word for word in words if re.fullmatch(r"\d+gb", word)]
    found = _named([word for word in words if word not in sizes], sizes)
    if found is None and len(words) > 1 and words[-1].isdigit():  # "A100 80"
        return _named(words[:-1], words[-1:])
    return found


def _named(words: list[str], sizes: list[str]) -> Card | None:
    wanted, gigabytes = "".join(words), [int(size.removesuffix("gb")) for size in sizes]
    named = [card for card in CARDS.values() if wanted in _names(card)]
    # Cards report up to an eighth less than the size that they are sold with.
    fitting = [card for card in named if all(7 / 8 * size < card.memory_bytes / GIB < size for size in gigabytes)]
    return min(fitting, key=lambda card: card.memory_bytes, default=None)


# Words of drivers' names that tell no cards apart.
_UNNAMED = re.compile(r"nvidia|geforce|tesla|quadro|gpu|generation|graphics|pcie|sxm\d?|hbm\d?e?")


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
        return replace(speed, name=text.strip(), memory_bytes=parse_size(size), context_bytes=_CONTEXT_BYTES)
    except ValueError:
        raise ValueError(
            f"gpu={text!r} is neither a size with its unit such as 8GiB, nor a size and a card's speed such as "
            f"48GiB@l40s, nor a known card; {_advice(text)}"
        ) from None


def _advice(text: str) -> str:
    several = re.fullmatch(r"\s*(\d+)\s*[x*]\s*(.+)", text)
    if several and card_named(several[2]):
        return f"for several GPUs give num_gpus={several[1]} and gpu={several[2]!r}"
    nearest = difflib.get_close_matches(text.lower().replace(" ", ""), CARDS, n=1, cutoff=0.6)
    return f"{f'the nearest is {nearest[0]}; ' if nearest else ''}known are {', '.join(CARDS)}"


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str, option: str = "size") -> int:
    """Return the bytes of "8GiB", "24 GB", "500MB", and of "12GBps" per second."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?(ps|/s)?\s*", text.lower())
    num_bytes = round(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
    if num_bytes <= 0:
        raise ValueError(f"{option}={text!r} is not a size; write, for instance, 8GiB, 24GB, or 12GBps for a link")
    return num_bytes
