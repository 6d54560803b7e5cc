"""Many steps of SmolVLA's distillation, bitwise equal wherever teacher and activations are."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmark_runs import Load
from fake_cuda.device import is_loaded
from torch import Tensor

from hf_memopt import ActivationOffloader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("quick_plans"),
]

# A few steps find wrong bytes, and are all that the fake GPU has time for; many steps test memory in long use.
NUM_STEPS = 4 if is_loaded() else 50
BATCH_SIZE = 2
SIZES = ["toy", pytest.param("real", marks=pytest.mark.slow)]
OFFLOADED = {
    "swap, everything": ("swap", {"mode": "all", "offload_threshold_mb": 0}),
    "stream, planned": ("stream", {"mode": "auto", "budget_gib": 0.001, "offload_threshold_mb": 0}),
}


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def resident(size: str, load: Load, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[Tensor]]:
    return train(load, size, tmp_path_factory.mktemp(size), "resident")


@pytest.fixture(scope="module", autouse=True)
def deterministic(load: Load) -> Iterator[None]:
    """Select kernels that add in a fixed order, as the fake GPU's always do."""
    with nullcontext() if is_loaded() else load("activations.model").deterministic():
        yield


@pytest.mark.parametrize("way", OFFLOADED)
def test_offloading_changes_no_weight(
    way: str, size: str, resident: tuple[list[float], list[Tensor]], load: Load, tmp_path: Path
) -> None:
    mode, options = OFFLOADED[way]
    offloader = ActivationOffloader(**options)
    losses, weights = train(load, size, tmp_path, mode, offloader)
    assert offloader.stats.bytes_moved > 0
    assert losses == resident[0]
    assert len(set(losses)) == NUM_STEPS
    assert all(torch.equal(found, expected) for found, expected in zip(weights, resident[1], strict=True))


def test_another_order_of_batches_is_noticed(
    size: str, resident: tuple[list[float], list[Tensor]], load: Load, tmp_path: Path
) -> None:
    """Make the comparison with the resident run fail."""
    losses, weights = train(load, size, tmp_path, "resident", seed=1)
    assert losses != resident[0]
    assert not all(torch.equal(found, expected) for found, expected in zip(weights, resident[1], strict=True))


def train(
    load: Load, size: str, folder: Path, mode: str, offloader: ActivationOffloader | None = None, seed: int = 0
) -> tuple[list[float], list[Tensor]]:
    """Return losses, and trained weights on the host."""
    benchmark, modes, timing = load("teacher.offload"), load("teacher.modes"), load("timing")
    policy, checkpoint = benchmark.start(benchmark.SIZES[size], folder)
    source = modes.Source(policy, checkpoint, torch.device("cuda", 0), torch.float32)
    handling = modes.MODES[mode](source)
    work = benchmark.prepare(handling, source, benchmark.SIZES[size], BATCH_SIZE)
    unobserved = timing.PhasePeaks(torch.device("cpu"))
    if offloader is not None:
        offloader.wrap(handling.student)
    losses = [
        benchmark.training_step(handling, replace(work, noise=noise_like(work.noise, seed, step)), unobserved)
        for step in range(NUM_STEPS)
    ]
    return losses, [p.detach().cpu() for p in handling.student.parameters() if p.requires_grad]


def noise_like(noise: Tensor, seed: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(NUM_STEPS * seed + step)
    return torch.randn(noise.shape, generator=generator).to(noise.device)
