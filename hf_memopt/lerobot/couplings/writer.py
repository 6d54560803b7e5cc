"""Computes couplings ahead of training, in any number of processes, and again after an interruption."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as tensors_to_bytes
from tqdm import tqdm

from hf_memopt.lerobot.couplings.coupling_spec import (
    Coupling,
    CouplingSpec,
    Load,
    Solve,
    draw_noise,
    observation_checksums,
)
from hf_memopt.lerobot.couplings.store import Columns, CouplingFolder, coupling_features
from hf_memopt.ranges import COUNT


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
