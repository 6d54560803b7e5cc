"""The couplings there are, and noise and checksums that are functions of one sample alone."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_memopt.ranges import COUNT

Observation = Mapping[str, Tensor]
Load = Callable[[list[int]], Observation]  # from names of samples to tensors, batch first
Solve = Callable[[Observation, Tensor], Tensor]  # from noise (batch, *shape) to targets of that shape

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, as int64: neighbours get unrelated weights


@dataclass(frozen=True)
class CouplingSpec:
    """The couplings there are, and the batches that they are computed in.

    A sample's neighbours in a batch change a matrix product's rounding, so batches are part of the spec: batch `n`
    holds the same samples whenever and wherever it is computed. With `batch_size=1` every coupling stands for itself.

    `key` is all that decides which target a noise gets, as JSON has it: two folders with one key hold the same pairs.
    Its `seed` is that of the noise; see `comparable_fields` for the others.
    """

    key: Mapping[str, Any]
    indices: Sequence[int]  # names of the samples, in the order in which they are batched
    shape: tuple[int, ...]  # of one sample's noise and target
    num_draws: int = 1  # couplings per sample
    batch_size: int = 16

    def __post_init__(self) -> None:
        for name in ("num_draws", "batch_size"):
            COUNT.check(name, getattr(self, name))
        if len(set(self.indices)) != len(self.indices) or not self.indices:
            raise ValueError(f"indices must name at least one sample, each once; {len(self.indices)} were given")

    @property
    def batches_per_draw(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    @property
    def num_batches(self) -> int:
        return self.num_draws * self.batches_per_draw

    def batch(self, number: int) -> tuple[list[int], int]:
        """Return the samples of a batch, and which of their draws it holds."""
        draw, position = divmod(number, self.batches_per_draw)
        start = position * self.batch_size
        return list(self.indices[start : start + self.batch_size]), draw

    def samples_sha256(self) -> str:
        return hashlib.sha256(",".join(map(str, self.indices)).encode()).hexdigest()

    def seeds(self, number: int) -> list[int]:
        indices, draw = self.batch(number)
        return [noise_seed(self.key["seed"], index, draw) for index in indices]


@dataclass(frozen=True)
class Coupling:
    """Observations, noises, and the targets where the teacher's ODE takes these: `(batch, *shape)` float32."""

    observation: Observation
    noise: Tensor
    target: Tensor


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
    """Draw `(len(seeds), *shape)` on the CPU, with one seed for each row; the global random generator is not used."""
    return torch.stack([torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def observation_checksums(observation: Mapping[str, Tensor]) -> Tensor:
    """Return an integer for each sample that changes with any bit of it, `(batch,)` int64 on the CPU.

    Sums the elements' bits, weighted by position, modulo 2^64: exact on every device and in every order.
    Zeros at the end of a row do not count. Takes one sample at a time, in 16 bytes for each of its elements.
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
