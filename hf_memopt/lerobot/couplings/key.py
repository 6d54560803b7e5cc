"""The key of a cache of couplings, and noise and checksums that are functions of one sample alone."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, as int64: neighbours get unrelated weights


@dataclass(frozen=True)
class CouplingKey:
    """Everything that decides which target a noise gets. Two caches with one key hold the same pairs.

    Attributes:
        weights: SHA-256 of the teacher's weights.
        solver: of its ODE, e.g. `"euler"`.
        num_steps: of the solver.
        dtype: that the teacher runs in.
        seed: of the noise.
        dataset: fingerprint of the data.
        preprocessing: fingerprint of the processing of a sample before the teacher sees it.
    """

    weights: str
    solver: str
    num_steps: int
    dtype: str
    seed: int
    dataset: str
    preprocessing: str


def check_same(folder: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise a ValueError that names each field of `expected` in which a cache differs, and both values."""
    different = [
        f"{name} is {_short(found.get(name))} there and {_short(value)} here"
        for name, value in expected.items()
        if found.get(name) != value
    ]
    if different:
        raise ValueError(
            f"the couplings in {folder} are not the ones asked for: {'; '.join(different)}. Use the settings that they "
            "were made with, or precompute them again into a new folder"
        )


def noise_seed(seed: int, index: int, draw: int) -> int:
    """Return the seed of one sample's noise, of 32 bits: torch's CPU generator takes no more of a seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}/{draw}".encode()).digest()[:4], "little")


def draw_noise(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Draw `(len(seeds), *shape)` on the CPU, each row of its own seed; the global random generator is left alone."""
    return torch.stack([torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def observation_checksums(observation: Mapping[str, Tensor]) -> Tensor:
    """Return an integer for each sample that changes with any bit of it, `(batch,)` int64 on the CPU.

    Sums of the elements' bits, each with a weight of its own position, modulo 2^64: exact on every device and in every
    order. Zeros at the end of a row do not count. Takes one sample at a time, in 16 bytes for each of its elements.
    """
    batch_size = len(next(iter(observation.values())))
    totals = torch.zeros(batch_size, dtype=torch.int64)
    for name in sorted(observation):
        totals = totals * 1_000_003 + torch.stack([_checksum(row) for row in observation[name]]).cpu()
    return totals


def _checksum(row: Tensor) -> Tensor:
    bits = row.contiguous().flatten()
    bits = bits if row.dtype == torch.bool else bits.view(_INTEGERS[row.element_size()])
    weights = torch.arange(1, bits.numel() + 1, device=bits.device) * _ODD
    # Odd, so that the top bit counts too.
    return (bits.to(torch.int64) * (weights ^ (weights >> 29) | 1)).sum()


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text[:17]}…'" if isinstance(value, str) and len(text) > 40 else text
