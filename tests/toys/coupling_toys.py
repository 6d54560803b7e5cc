"""A teacher, data and a spec of couplings, small enough to be made in any process."""

import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.disk.files_on_disk import weights_sha256
from hf_memopt.lerobot.couplings.cache import Coupling, CouplingCache, CouplingSpec, compute, precompute

SHAPE = (3, 2)
NUM_SAMPLES = 23


class Teacher(nn.Module):
    """A velocity field; a call takes noise to targets in four Euler steps."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6 + 5 + 1, 32), nn.Tanh(), nn.Linear(32, 6))

    def forward(self, observation: dict[str, Tensor], noise: Tensor) -> Tensor:
        x = noise.flatten(1)
        for step in range(4):
            time = torch.full((len(x), 1), 1 - step / 4)
            x = x - self.layers(torch.cat([x, observation["state"], time], dim=1)) / 4
        return x.reshape(noise.shape)


def load(indices: list[int]) -> dict[str, Tensor]:
    """Make an observation a function of the sample's name."""
    states = [torch.randn(5, generator=torch.Generator().manual_seed(index)) for index in indices]
    return {"state": torch.stack(states)}


def load_augmented(indices: list[int]) -> dict[str, Tensor]:
    """Add random noise on every look."""
    return {"state": load(indices)["state"] + 0.01 * torch.randn(len(indices), 5)}


def make_spec(*, num_draws: int = 2, batch_size: int = 4, num_samples: int = NUM_SAMPLES, **key: Any) -> CouplingSpec:
    """Return a spec over shuffled samples; `key` changes fields of its key."""
    made = {"weights": weights_sha256(Teacher()), "solver": "euler", "num_steps": 4, "dtype": "float32", "seed": 7}
    made |= {"dataset": "numbers", "preprocessing": "none"}
    names = [100 + 5 * i % num_samples for i in range(num_samples)]
    return CouplingSpec({**made, **key}, names, SHAPE, num_draws, batch_size)


def write(folder: Path, solve: Teacher | None = None, **options: Any) -> list[int]:
    """Precompute the default spec in shards of two batches."""
    return precompute(solve or Teacher(), load, make_spec(), folder, **{"shard_size": 8, **options})


def precompute_slowly(folder: Path, seed: int, started: Any) -> None:
    """Pause in every batch, so that a kill can hit any moment."""

    def pause_and_load(indices: list[int]) -> Any:
        time.sleep(0.04 * random.Random(seed + indices[0]).random())
        return load(indices)

    started.set()
    precompute(Teacher(), pause_and_load, make_spec(), folder, shard_size=8)


def couplings_of(cache: CouplingCache, spec: CouplingSpec | None = None) -> list[Coupling]:
    """Return the folder's right couplings, batch by batch."""
    spec = spec or make_spec()
    batches = [spec.batch(number) for number in range(spec.num_batches)]
    return [cache.of(indices, [draw] * len(indices), load(indices)) for indices, draw in batches]


def teachers_couplings(spec: CouplingSpec | None = None) -> list[Coupling]:
    """Return the same couplings from the teacher."""
    spec = spec or make_spec()
    return [compute(Teacher(), load, spec, number) for number in range(spec.num_batches)]


def assert_same(first: list[Coupling], second: list[Coupling]) -> None:
    """Compare bit for bit."""
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours.noise, theirs.noise)
        assert torch.equal(ours.target, theirs.target)
        assert torch.equal(ours.observation["state"], theirs.observation["state"])


def assert_is_the_teachers(folder: Path) -> None:
    """Check for the default spec's couplings."""
    cache = CouplingCache(folder)
    cache.check(make_spec().key)
    assert_same(couplings_of(cache), teachers_couplings())
