"""Weights that train with a home, in simulated steps: bytes and peaks against those of real runs and of arithmetic."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import nn

from hf_memopt import StreamedWeights
from hf_memopt.planning import MemoryEstimate, estimate_peak_memory
from hf_memopt.planning.accounting.categories import GRADIENT, OPTIMIZER_STATE, STREAMED
from hf_memopt.planning.cards.gpus import CARDS
from hf_memopt.planning.cards.memory_below import Disk, MemoryBelow
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.simulated_step import SimulatedStep
from hf_memopt.planning.simulation.child_process import run_isolated
from hf_memopt.transfer import SyncCopier
from hf_memopt.transfer.direct_io import PAGE

transformers = LateModule("transformers")

WORDS, WIDTH, LAYERS = 512, 64, 2
TABLE = 4 * WORDS * WIDTH
# That extents of weights, gradients and state may take more than these have, of nine weights in each layer.
PAGES = 3 * PAGE * (9 * LAYERS + 3)


class Counting(SyncCopier):
    """Copies that are made on the CPU, too, as those of an accelerator."""


class Job:
    """Trains a Llama, whose weights have a home unless that is None, with clipping and AdamW."""

    def __init__(
        self, device: torch.device, home: Any, num_passes: int, copier: Any = None, autocast: bool = False
    ) -> None:
        config = transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
        with torch.device("cpu" if home else device):
            self.model = transformers.LlamaForCausalLM(config)
        self.num_passes, self.autocast = num_passes, autocast
        self.weights = None
        if home:
            self.weights = StreamedWeights(self.model, home=home, trained=True, device=device, copier=copier)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.adopted = None if self.weights is None else self.weights.adopt(self.optimizer)
        self.words = torch.zeros(1, 16, dtype=torch.long, device=device)

    def step(self) -> None:
        for _ in range(self.num_passes):
            rounded = torch.autocast(self.words.device.type, torch.bfloat16, enabled=self.autocast)
            with rounded, nullcontext() if self.weights is None else self.weights.stream():
                loss = self.model(self.words, labels=self.words).loss
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def estimate(home: str | None, num_passes: int, **options: Any) -> MemoryEstimate:
    return estimate_peak_memory(lambda device: Job(device, home, num_passes, **options), Job.step, num_steps=3)


class Real:
    """The third step of a real run: bytes that are brought and go back, and the peak of weights on the device."""

    def __init__(self, home: str, num_passes: int, **options: Any) -> None:
        copier = Counting()
        job = Job(torch.device("cpu"), home, num_passes, copier=copier, **options)
        for _ in range(3):
            before = copier.bytes_to_device, copier.bytes_to_host
            job.step()
        self.brought, self.back = copier.bytes_to_device - before[0], copier.bytes_to_host - before[1]
        assert job.weights is not None
        assert job.adopted is not None
        report = job.weights.report()
        self.peak_bytes, self.weights = report.peak_device_bytes, report.streamed_bytes
        self.state, self.peak_of_state = job.adopted.report().state_bytes, job.adopted.report().peak_bytes


@pytest.mark.parametrize(
    ("home", "num_passes", "autocast"), [("host", 1, False), ("host", 2, True), ("file", 2, False), ("file", 1, True)]
)
@pytest.mark.sweep(share=0.25)
def test_bytes_are_those_of_a_real_run(home: str, num_passes: int, autocast: bool) -> None:
    estimated, real = estimate(home, num_passes, autocast=autocast), Real(home, num_passes, autocast=autocast)
    found = estimated.streamed
    assert found is not None
    assert (found.bytes_to_device, found.bytes_to_home) == (real.brought, real.back)
    assert found.peak_bytes == real.peak_bytes
    # Gradients have the size of the weights. Rows of the table are looked up at home, and weights that are used at the
    # turn to backward stay.
    weights, state = real.weights, real.state
    assert found.bytes_to_home == num_passes * weights + weights + state
    most = 2 * num_passes * (weights - TABLE) + (num_passes - 1) * weights + 2 * weights + state
    assert most - num_passes * real.peak_bytes <= found.bytes_to_device < most
    moved_in_passes = found.bytes_to_device - (num_passes * weights + weights + state)
    assert found.bytes_read == (moved_in_passes + weights if home == "file" else 0)
    assert estimated.unreached == ()


@pytest.mark.slow
def test_an_update_of_many_passes_is_told_by_two() -> None:
    found, real = estimate("host", 2).with_passes(5 / 2).streamed, Real("host", 5)
    assert found is not None
    assert (found.bytes_to_device, found.bytes_to_home) == (real.brought, real.back)


@pytest.mark.e2e
def test_all_memory_is_at_home_but_for_what_visits() -> None:
    plain, host, file = (estimate(home, 2) for home in (None, "host", "file"))
    real = Real("host", 2)
    at_home = 2 * real.weights + real.state
    assert host.host_bytes == pytest.approx(at_home, rel=0.01)
    assert at_home <= file.disk_bytes <= at_home + PAGES
    assert host.breakdown[STREAMED] <= real.peak_bytes
    assert host.breakdown[OPTIMIZER_STATE] <= 1.1 * real.peak_of_state  # and counters
    assert host.breakdown[GRADIENT] <= 3 * TABLE
    assert host.peak_bytes == file.peak_bytes < plain.peak_bytes - 0.5 * (2 * real.weights + real.state)
    assert plain.streamed is None


@pytest.mark.slow
def test_slow_copies_set_the_time_and_writes_wear_the_disk() -> None:
    simulated = SimulatedStep(lambda device: Job(device, "file", 2), Job.step, num_steps=3, num_micro_batches=2)
    card, below = replace(CARDS["rtx4090"], link_bytes_per_s=1e10), MemoryBelow(None, Disk(None, 1e8))
    found = run_isolated(lambda: simulate_step(simulated, gpu=card, below=below))
    assert found.streamed is not None
    written, read_ms = found.streamed.bytes_to_home, 1e3 * found.streamed.bytes_to_device / 1e8
    assert written <= found.disk_bytes_written <= written + 2 * PAGES
    assert found.step_ms is not None
    assert found.disk_tb_per_day == pytest.approx(found.disk_bytes_written / 1e12 * 86.4e6 / found.step_ms)
    assert found.stall_ms is not None
    assert 0.95 * read_ms < found.stall_ms < 2 * read_ms
