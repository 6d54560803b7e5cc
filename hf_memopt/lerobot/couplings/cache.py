"""Couplings on disk: computed ahead of training, in any number of processes, and read by sample.

Noise and checksums are functions of one sample alone.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from hf_memopt.lerobot.couplings.store import Columns, CouplingFolder, check_same, coupling_features
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

    def seeds(self, number: int) -> list[int]:
        indices, draw = self.batch(number)
        return [noise_seed(self.key["seed"], index, draw) for index in indices]


@dataclass(frozen=True)
class Coupling:
    """Observations, noises, and the targets where the teacher's ODE takes these: `(batch, *shape)` float32."""

    observation: Observation
    noise: Tensor
    target: Tensor


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


class CouplingCache:
    """The couplings of one folder, by sample. Copies and pickles read and check the folder anew.

    Costs one read of the folder, and shows a bar if that takes more than ten seconds. Raises a ValueError that names
    the file if the folder is incomplete, damaged, or has shards of other couplings.
    """

    def __init__(self, path: Path | str) -> None:
        self.folder = CouplingFolder(Path(path).expanduser())
        self.description = self.folder.description
        self.has_observations: bool = self.description["stores_observations"]
        self._rows: Dataset = self.folder.read().with_format("torch")
        names = self._rows.with_format("torch", columns=["index"])
        self.indices: list[int] = names[: self.description["num_samples"]]["index"].tolist()
        self._position = {index: position for position, index in enumerate(self.indices)}

    def __reduce__(self) -> Any:
        return CouplingCache, (self.folder.path,)

    def check(self, expected: Mapping[str, Any]) -> None:
        """Raise a ValueError that names each field in which these couplings are not as expected."""
        check_same(self.folder.path, self.description, expected)

    def of(self, indices: Sequence[int], draws: Sequence[int], observation: Observation | None) -> Coupling:
        """Return one coupling of each sample, on the CPU; `observation=None` takes the stored one."""
        missing = [index for index in indices if index not in self._position]
        if missing:
            raise ValueError(
                f"{self.folder.path} has no couplings for sample {missing[0]}; precompute all samples that are used"
            )
        numbers = [draw * len(self.indices) + self._position[i] for i, draw in zip(indices, draws, strict=True)]
        self.folder.check_unchanged(numbers)
        rows = self._rows[numbers]
        if observation is None:
            observation = _stack([tensors_from_bytes(blob) for blob in rows["observation"]])
        self._check_observations(indices, rows["observation_checksum"], observation)
        noise = draw_noise(rows["noise_seed"].tolist(), self.description["shape"])
        return Coupling(observation, noise, rows["target"].reshape(noise.shape))

    def _check_observations(self, indices: Sequence[int], stored: Tensor, observation: Observation) -> None:
        differs = (observation_checksums(observation) != stored).nonzero()
        if len(differs):
            raise ValueError(
                f"the observation of sample {indices[int(differs[0])]} is not the one that its coupling in "
                f"{self.folder.path} was computed for: random augmentation, other data or other preprocessing. Train "
                "without augmentation, or precompute with the observations stored"
            )


def _stack(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Batch first; rows of different length get zeros at their end."""
    return {name: pad_sequence([sample[name] for sample in samples], batch_first=True) for name in samples[0]}


def precompute(
    solve: Solve,
    load: Load,
    spec: CouplingSpec,
    path: Path | str,
    *,
    shard_size: int = 1024,
    store_observations: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> list[int]:
    """Write the couplings of a specification to a folder, for `CouplingCache`; return shards that are still missing.

    Call it again after an interruption or damage, with any number of processes: complete shards, of `shard_size`
    couplings in whole batches, stay, and the others are written anew. Processes need not know of each other; each takes
    every `world_size`-th shard. Its files that are there already are read to find damage. Raises ValueError if the
    folder holds other couplings or other files, another process writes the same shard, or `load` does not repeat an
    observation that is not stored. Disk: 4 bytes for each element of a target, and 24 for each coupling.
    """
    COUNT.check("shard_size", shard_size)
    batches_per_shard = -(-shard_size // spec.batch_size)
    num_shards = -(-spec.num_batches // batches_per_shard)
    folder = CouplingFolder(Path(path).expanduser())
    folder.begin(
        {
            **spec.key,
            "num_samples": len(spec.indices),
            "samples": hashlib.sha256(",".join(map(str, spec.indices)).encode()).hexdigest(),
            "shape": list(spec.shape),
            "num_draws": spec.num_draws,
            "batch_size": spec.batch_size,
            "stores_observations": store_observations,
            "num_shards": num_shards,
        }
    )
    if not store_observations:
        _check_repeatable(load, spec)
    features = coupling_features(math.prod(spec.shape), store_observations)
    mine = folder.incomplete(range(rank, num_shards, world_size))
    batches = {
        shard: range(shard * batches_per_shard, min((shard + 1) * batches_per_shard, spec.num_batches))
        for shard in mine
    }
    total = sum(len(numbers) for numbers in batches.values())
    with tqdm(total=total, desc="precompute", unit="batch", disable=rank != 0 or not mine) as bar:
        for shard, numbers in batches.items():
            folder.write(shard, _rows(solve, load, spec, numbers, store_observations, bar), features)
    return folder.missing()


@torch.no_grad()
def compute(solve: Solve, load: Load, spec: CouplingSpec, number: int) -> Coupling:
    """Ask the teacher for batch `number`; arguments as for `precompute`. ValueError for targets of another shape."""
    observation = load(spec.batch(number)[0])
    noise = draw_noise(spec.seeds(number), spec.shape)
    target = solve(observation, noise)
    if target.shape != noise.shape:
        raise ValueError(f"solve gave targets of shape {tuple(target.shape)} for noise of shape {tuple(noise.shape)}")
    return Coupling(observation, noise, target.to("cpu", torch.float32))


def _rows(
    solve: Solve, load: Load, spec: CouplingSpec, numbers: range, store_observations: bool, bar: Any
) -> Iterator[Columns]:
    for number in numbers:
        indices, draw = spec.batch(number)
        coupling = compute(solve, load, spec, number)
        columns: dict[str, Any] = {
            "index": indices,
            "draw": [draw] * len(indices),
            "noise_seed": spec.seeds(number),
            "observation_checksum": observation_checksums(coupling.observation).numpy(),
            "target": coupling.target.flatten(1).numpy(),
        }
        if store_observations:
            tensors = {name: tensor.cpu() for name, tensor in coupling.observation.items()}
            samples = [
                {name: tensor[row].contiguous() for name, tensor in tensors.items()} for row in range(len(indices))
            ]
            columns["observation"] = [tensors_to_bytes(sample) for sample in samples]
        yield columns
        bar.update()


def _check_repeatable(load: Load, spec: CouplingSpec) -> None:
    indices, _ = spec.batch(0)
    first, *others = (observation_checksums(load(indices)) for _ in range(3))
    if any(not torch.equal(first, other) for other in others):
        raise ValueError(
            "the same samples looked different when they were loaded again: the data is augmented at random, and a "
            "cached target belongs to one augmented sample. Switch the augmentation off, or store the observations"
        )
