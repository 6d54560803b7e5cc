"""Couplings on disk: computed ahead of training, in any number of processes, and read by sample."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from hf_memopt.lerobot.couplings.coupling_spec import (
    Coupling,
    CouplingSpec,
    Load,
    Observation,
    Solve,
    check_same,
    draw_noise,
    observation_checksums,
)
from hf_memopt.lerobot.couplings.store import Columns, CouplingFolder, coupling_features
from hf_memopt.ranges import COUNT


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
            "samples": spec.samples_sha256(),
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
