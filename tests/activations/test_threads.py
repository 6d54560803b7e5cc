"""Tests of one offloader on several threads and after interrupts: gradients are the plain run's."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from interrupts import Interrupter
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memopt import ActivationOffloader, SyncCopier

WIDTH, NUM_THREADS, NUM_STEPS = 64, 3, 12


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number % 3 == 2 else layer(x)
            x = x.sin().exp()
        return x


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Layers()


def steps(model: nn.Module, thread: int, offloader: ActivationOffloader | None) -> Iterator[tuple[Tensor, ...]]:
    """Yield the gradients of each step; threads have batches of other sizes."""
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(100 * thread + step)
        x = torch.randn(64 + 32 * thread, WIDTH, generator=generator)
        if offloader is None:
            loss = model(x).mean()
        else:
            with offloader.offload_context(model):
                loss = model(x).mean()
        yield torch.autograd.grad(loss, list(model.parameters()))


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {"mode": "all"},
    "inputs": {"mode": "inputs"},
    "auto": {"max_slowdown": 1.0},
    "budget": {"budget_gib": 6e-4},
    "disk": {"mode": "all", "host_budget_gib": 2e-4},
    "auto and disk": {"max_slowdown": 1.0, "host_budget_gib": 1e-4},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.sweep(share=0.4)
def test_each_thread_has_the_plain_gradients(model: nn.Module, options: str, tmp_path: Path) -> None:
    arguments = OPTIONS[options]
    if "disk" in options:
        arguments = {**arguments, "disk": tmp_path}
    offloader = ActivationOffloader(offload_threshold_mb=0.01, copier=AdversarialCopier("late"), **arguments)
    wanted = [list(steps(model, thread, None)) for thread in range(NUM_THREADS)]
    barrier = threading.Barrier(NUM_THREADS)

    def train(thread: int) -> list[tuple[Tensor, ...]]:
        barrier.wait()
        return list(steps(model, thread, offloader))

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        found = list(threads.map(train, range(NUM_THREADS)))
    for of_thread, plain_of_thread in zip(found, wanted, strict=True):
        for got, plain in zip(of_thread, plain_of_thread, strict=True):
            assert all(map(torch.equal, got, plain))
    assert offloader.stats.bytes_moved > 0
    assert offloader.stats.host_bytes_live == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python swallows it in callbacks
@pytest.mark.parametrize("options", [*OPTIONS, "disk alone"])
@pytest.mark.sweep(share=0.2)
def test_the_next_step_is_right_after_an_interrupt_at_any_place(model: nn.Module, options: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"disk": tmp_path} if "disk" in options else {}
    arguments |= OPTIONS.get(options, {"mode": "all"})
    # An adversarial copy has no hold on its source, as a real one has, so that nothing may cut one off from the disk.
    copier = {"disk alone": None, "disk": SyncCopier(), "auto and disk": SyncCopier()}.get(
        options, AdversarialCopier("late")
    )
    offloader = ActivationOffloader(offload_threshold_mb=0.01, copier=copier, **arguments)
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))

    def step() -> tuple[Tensor, ...]:
        with offloader.offload_context(model):
            loss = model(x).mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    want = torch.autograd.grad(model(x).mean(), list(model.parameters()))
    interrupter = Interrupter("/hf_memopt/activations/", "/hf_memopt/transfer/")
    for place in interrupter.at_places(step, 40, num_warm_ups=6):
        assert all(map(torch.equal, step(), want)), place
