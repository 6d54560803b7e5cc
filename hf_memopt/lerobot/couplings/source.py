"""Couplings of a frozen teacher: computed when they are needed, or once and for all, and the same bits either way.

A *coupling* is a noise and the target that the teacher's ODE takes it to, for one sample of the data. Reflow (arXiv
2209.03003) trains on couplings; a step that reads them from disk needs no teacher.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from hf_memopt.lerobot.couplings.cache import CouplingCache
from hf_memopt.lerobot.couplings.coupling_spec import Coupling, CouplingSpec, Load, Solve, compute
from hf_memopt.lerobot.couplings.key import CouplingKey, noise_seed
from hf_memopt.lerobot.couplings.writer import precompute

__all__ = [
    "Coupling",
    "CouplingCache",
    "CouplingKey",
    "CouplingSource",
    "CouplingSpec",
    "precompute",
]


class CouplingSource:
    """Iterates over batches of couplings, once per epoch over all samples; epoch `e` takes draw `e % num_draws`.

    Both kinds yield the same batches in the same order with the same bits. The order of the batches is shuffled per
    epoch with the key's seed. Several ranks take different batches, the same number each; a remainder is dropped. Make
    one with `online` or `cached`.
    """

    def __init__(self, spec: CouplingSpec, fetch: Callable[[int], Coupling], rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} must be at least 0 and less than world_size={world_size}")
        if spec.batches_per_draw < world_size:
            raise ValueError(
                f"batch_size={spec.batch_size} makes {spec.batches_per_draw} batches of {len(spec.indices)} samples, "
                f"too few for {world_size} ranks; use a smaller batch_size"
            )
        self.spec = spec
        self._fetch = fetch
        self._rank, self._world_size = rank, world_size
        self._epoch = 0

    @classmethod
    def online(
        cls, solve: Solve, load: Load, spec: CouplingSpec, *, rank: int = 0, world_size: int = 1
    ) -> "CouplingSource":
        """Ask the teacher for each batch when it is needed.

        Args:
            solve: from an observation and noise `(batch, *shape)` to targets of that shape.
            load: from names of samples to the observation that conditions the teacher: tensors, batch first.
            spec: which couplings there are.
            rank: rank of this process.
            world_size: number of processes.
        """
        return cls(spec, lambda number: compute(solve, load, spec, number), rank, world_size)

    @classmethod
    def cached(
        cls,
        path: Path | str,
        load: Load | None = None,
        *,
        expected: CouplingKey | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> "CouplingSource":
        """Read the couplings that `precompute` wrote. Needs no teacher.

        Args:
            path: the folder.
            load: as for `online`; may be None if the observations were stored.
            expected: refuse couplings of another key.
            rank: rank of this process.
            world_size: number of processes.

        Raises:
            ValueError: incomplete, truncated, damaged or stale couplings, or shards of others (the message names the
                file, or each field that differs), or no `load` without stored observations. While iterating: `load`
                gives another observation than the one that a coupling was computed for.
        """
        cache = CouplingCache(path)
        if expected is not None:
            cache.check(expected.to_dict())
        if load is None and not cache.has_observations:
            raise ValueError(f"{path} holds no observations; pass `load`")
        return cls(cache.spec, lambda number: cache.batch(number, load), rank, world_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the draw and the order of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Batches per epoch and rank."""
        return self.spec.batches_per_draw // self._world_size

    def __iter__(self) -> Iterator[Coupling]:
        generator = torch.Generator().manual_seed(noise_seed(self.spec.key.seed, -1, self._epoch))
        order = torch.randperm(self.spec.batches_per_draw, generator=generator)
        first = (self._epoch % self.spec.num_draws) * self.spec.batches_per_draw
        for position in range(len(self)):
            yield self._fetch(first + int(order[position * self._world_size + self._rank]))
