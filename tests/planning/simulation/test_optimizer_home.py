"""Optimizers whose state lives elsewhere, in simulated steps: bytes by arithmetic, times by speeds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from hf_memopt.planning import MemoryEstimate
from hf_memopt.planning.accounting.categories import OPTIMIZER_STATE
from hf_memopt.planning.cards.gpus import CARDS
from hf_memopt.planning.cards.memory_below import Disk, MemoryBelow
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.training.low_bit import low_bit_adamw
from hf_memopt.transfer.direct_io import PAGE
from hf_memopt.weights import OffloadedOptimizer

CARD = CARDS["rtx4090"]
WIDTH, DEPTH = 1024, 8
WEIGHTS = DEPTH * WIDTH * WIDTH
FLOATS = 4 * WEIGHTS

# Makes the optimizer; the bytes of its state, at most.
Kind = Callable[[list[nn.Parameter]], Optimizer]
KINDS: dict[str, tuple[Kind, int]] = {
    "fused AdamW": (lambda weights: torch.optim.AdamW(weights, fused=True), 2 * FLOATS),
    "foreach AdamW": (lambda weights: torch.optim.AdamW(weights, foreach=True), 2 * FLOATS),
    "SGD": (lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9), FLOATS),
    "Adafactor": (lambda weights: torch.optim.Adafactor(weights), DEPTH * 2 * WIDTH * 4),
    "AdamW of 8 bits": (lambda weights: low_bit_adamw(8)(weights), 2 * (WEIGHTS + WEIGHTS // 256 * 4 + DEPTH * 1024)),
}


class Job:
    """Trains layers, and compares the bytes that its optimizer has moved with those of the state."""

    def __init__(self, device: torch.device, kind: str, home: Any, dtype: torch.dtype) -> None:
        make, self.state_bytes = KINDS[kind]
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=device, dtype=dtype) for _ in range(DEPTH)]
        self.model = nn.Sequential(*layers)
        self.optimizer = make(list(self.model.parameters()))
        if home is not None:
            self.optimizer = OffloadedOptimizer(self.optimizer, home=home)
        self.rows = torch.zeros(4, WIDTH, device=device, dtype=dtype)
        self.num_updates = 0

    def step(self) -> None:
        for _ in range(2):
            self.model(self.rows).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_updates += 1
        if isinstance(self.optimizer, OffloadedOptimizer):
            report = self.optimizer.report()
            assert report.bytes_written == self.num_updates * report.state_bytes
            assert report.bytes_read == (self.num_updates - 1) * report.state_bytes


def estimate(
    kind: str, home: str | None, link: float = 1e10, disk: float = 1e9, dtype: torch.dtype = torch.float32
) -> MemoryEstimate:
    simulated = SimulatedStep(lambda device: Job(device, kind, home, dtype), Job.step, num_micro_batches=2)
    card, below = replace(CARD, link_bytes_per_s=link), MemoryBelow(None, Disk(None, disk))
    return run_isolated(lambda: simulate_step(simulated, gpu=card, below=below))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sweep(share=0.3)
def test_each_byte_of_state_is_read_once_and_written_once(kind: str) -> None:
    low_bit_adamw(8)  # imported before a process is forked
    state = KINDS[kind][1]
    on_device, on_host, in_file = (estimate(kind, home) for home in (None, "host", "file"))
    assert on_host.host_bytes == pytest.approx(state, rel=0.01, abs=1024)
    pages = 2 * PAGE * DEPTH
    assert state * 0.99 <= in_file.disk_bytes_written == in_file.update_bytes_written <= state + pages
    assert in_file.disk_bytes == in_file.disk_bytes_written
    assert in_file.peak_bytes == on_host.peak_bytes
    # Of the state two layers' parts are on the device at most, and more in the first update, which makes it.
    assert on_device.peak_bytes - on_host.peak_bytes >= (1 - 4 / DEPTH) * state - 2**20
    assert on_device.breakdown.get(OPTIMIZER_STATE, 0) >= 2 * on_host.breakdown.get(OPTIMIZER_STATE, 0)


def test_state_of_16_bits_is_half_as_much() -> None:
    assert estimate("fused AdamW", "host", dtype=torch.bfloat16).host_bytes == FLOATS


def test_copies_set_the_time_and_passes_do_not_multiply_them() -> None:
    plain, host, file = (estimate("fused AdamW", home) for home in (None, "host", "file"))
    assert plain.stall_ms == 0.0
    for found, bytes_per_s in ((host, 1e10), (file, 1e9)):
        assert plain.step_ms is not None
        assert found.step_ms is not None
        one_way_ms = 1e3 * 2 * FLOATS / bytes_per_s
        assert one_way_ms < found.step_ms - plain.step_ms < 2.2 * one_way_ms
        assert found.update_stall_ms == pytest.approx(found.stall_ms)
        many = found.with_passes(8)
        assert many.stall_ms == found.stall_ms
        assert many.disk_bytes_written == found.disk_bytes_written
