"""Which couplings there are, and one batch of them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_memopt.lerobot.couplings.key import CouplingKey, noise_seed

Observation = Mapping[str, Tensor]
Load = Callable[[list[int]], Observation]
Solve = Callable[[Observation, Tensor], Tensor]


@dataclass(frozen=True)
class CouplingSpec:
    """Which couplings there are, and which of them are computed together.

    A sample's neighbours in a batch change a matrix product's rounding, so batches are part of the spec: batch `n`
    holds the same samples whenever and wherever it is computed. With `batch_size=1` every coupling stands for itself.

    Attributes:
        key: the inputs that the couplings depend on.
        indices: names of the samples, in the order in which they are batched.
        shape: shape of one sample's noise and target.
        num_draws: how many couplings each sample has.
        batch_size: samples per batch, at least 1.
    """

    key: CouplingKey
    indices: Sequence[int]
    shape: tuple[int, ...]
    num_draws: int = 1
    batch_size: int = 16

    def __post_init__(self) -> None:
        for name in ("num_draws", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if len(set(self.indices)) != len(self.indices) or not self.indices:
            raise ValueError(f"indices must name at least one sample, each once; {len(self.indices)} were given")

    @property
    def batches_per_draw(self) -> int:
        """Batches that take each sample once."""
        return -(-len(self.indices) // self.batch_size)

    @property
    def num_batches(self) -> int:
        """All batches, of all draws."""
        return self.num_draws * self.batches_per_draw

    def batch(self, number: int) -> tuple[list[int], int]:
        """Return the samples of a batch, and which of their draws it holds."""
        draw, position = divmod(number, self.batches_per_draw)
        start = position * self.batch_size
        return list(self.indices[start : start + self.batch_size]), draw

    def samples_sha256(self) -> str:
        """SHA-256 of the samples' names and order."""
        return hashlib.sha256(",".join(map(str, self.indices)).encode()).hexdigest()

    def seeds(self, number: int) -> list[int]:
        """Return the seeds of a batch's noise."""
        indices, draw = self.batch(number)
        return [noise_seed(self.key.seed, index, draw) for index in indices]


@dataclass(frozen=True)
class Coupling:
    """One batch of couplings.

    Attributes:
        indices: names of the samples.
        observation: the result of `load` for them, or the one stored with the couplings.
        noise: `(batch, *shape)` float32.
        target: `(batch, *shape)` float32, where the teacher's ODE takes that noise.
    """

    indices: list[int]
    observation: Observation
    noise: Tensor
    target: Tensor
