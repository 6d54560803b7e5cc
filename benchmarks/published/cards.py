"""Cards of published measurements that `CARDS` lacks, by their vendors' data sheets."""

from dataclasses import replace

from hf_memopt.planning.cards.gpus import CARDS, Card

_OTHERS = {
    "rtx8000": replace(
        CARDS["t4"], float32_flops=16.3e12, half_flops=130.5e12, memory_bytes_per_s=672e9, memory_bytes=45 * 2**30
    ),
    # The card with 8 GB is the SUPER.
    "rtx2060-8gb": replace(
        CARDS["t4"], float32_flops=7.2e12, half_flops=28.7e12, memory_bytes_per_s=448e9, memory_bytes=7 * 2**30
    ),
    "rtx3080ti-laptop": replace(
        CARDS["rtx3090"], float32_flops=23.6e12, half_flops=47.2e12, memory_bytes_per_s=512e9, memory_bytes=15 * 2**30
    ),
    "h100-pcie": replace(CARDS["h100"], float32_flops=51e12, half_flops=756e12, memory_bytes_per_s=2039e9),
}


def card_of(gpu: str) -> Card | None:
    """Return the card of a row; None if its figures are unknown, such as those of AMD's cards."""
    other = _OTHERS.get(gpu)
    return CARDS.get(gpu) if other is None else replace(other, name=gpu)
