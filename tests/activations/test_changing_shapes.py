"""Tests that batches of changing sizes keep host memory near the largest batch's need, in every mode."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adversarial_copier import AdversarialCopier
from gradients import equal, take_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memopt import ActivationOffloader, SyncCopier, detect_leaks
from hf_memopt.memory.logger import memory_metrics
from hf_memopt.memory.tracker import MemoryTracker
from hf_memopt.transfer import Copier

WIDTH = 16
MODES = ("all", "inputs", "auto")


class Blocks(nn.Module):
    def __init__(self, num_blocks: int, is_checkpointed: bool) -> None:
        super().__init__()
        self._is_checkpointed = is_checkpointed
        self._blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(num_blocks)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self._blocks:
            hidden = hidden + (
                checkpoint(block, hidden, use_reentrant=False) if self._is_checkpointed else block(hidden)
            )
        return hidden


class Training:
    """Training in steps of random lengths."""

    def __init__(self, mode: str, copier: Copier) -> None:
        torch.manual_seed(0)
        self.model = Blocks(4, is_checkpointed=mode == "inputs")
        self.offloader = ActivationOffloader(mode=mode, offload_threshold_mb=0.001, copier=copier)
        self._dice = random.Random(0)
        self.largest_pass = 0

    def step(self) -> None:
        batch = torch.randn(self._dice.randint(1, 5), self._dice.randint(4, 63), WIDTH, requires_grad=True)
        with self.offloader.offload_context(self.model):
            loss = self.model(batch).square().mean()
        self.largest_pass = max(self.largest_pass, self.offloader.stats.host_bytes_live)
        loss.backward()

    def check_many(self, num_steps: int, num_quiet: int) -> None:
        """Check for at most 1.5 times the largest pass's need, and no allocation in the last `num_quiet` steps."""
        for number in range(num_steps):
            if number == num_steps - num_quiet:
                before = self.offloader.stats.num_host_allocations
            self.step()
            stats = self.offloader.stats
            assert stats.host_bytes_live == 0
            assert 0 < stats.host_bytes_pinned <= 1.5 * self.largest_pass
        assert stats.num_host_allocations == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sweep(share=0.3)
def test_host_memory_stays_near_the_largest_need(mode: str) -> None:
    Training(mode, SyncCopier()).check_many(240, 80)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_host_memory_stays_near_the_largest_need_for_3000_steps(mode: str) -> None:
    Training(mode, SyncCopier()).check_many(3000, 1000)


@pytest.mark.sweep(share=1 / 3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["early", "late", "random"])
def test_gradients_are_exact_whatever_block_a_tensor_is_in(mode: str, schedule: str) -> None:
    training, plain = Training(mode, AdversarialCopier(schedule)), Training(mode, SyncCopier())
    plain.offloader.enabled = False
    for number in range(30):
        for each in (training, plain):
            torch.manual_seed(number)
            each.step()
        assert equal(take_gradients(training.model), take_gradients(plain.model))


def taking_some_more_at_each(training: Training) -> Callable[[], None]:
    """Return a step that never releases its pass."""
    graphs: list[Tensor] = []

    def step() -> None:
        with training.offloader.offload_context(training.model):
            graphs.append(training.model(torch.randn(2, 32, WIDTH, requires_grad=True)))

    return step


def test_a_leak_report_says_what_offloading_holds() -> None:
    training = Training("all", SyncCopier())
    training.step()
    before = training.offloader.stats
    report = detect_leaks(taking_some_more_at_each(training), 24)
    after = training.offloader.stats
    assert report.leaking
    assert report.offload.num_bytes >= after.host_bytes_pinned > 2 * before.host_bytes_pinned
    assert 0 < report.offload.num_allocations <= after.num_host_allocations - before.num_host_allocations
    assert "Offloading holds" in str(report)


def test_memory_metrics_say_what_a_disk_holds(tmp_path: Path) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, disk=tmp_path)
    with offloader.offload_context(layer):
        loss = layer(torch.ones(4, WIDTH)).tanh().sum()
    loss.backward()
    tracker = MemoryTracker("cpu")
    figures, stats = memory_metrics(tracker, tracker.read()), offloader.stats
    assert figures["memory/disk_gib"] >= stats.disk_bytes_held / 2**30 > 0
    assert figures["memory/disk_written_gib"] >= stats.disk_bytes_written / 2**30 > 0


def test_memory_metrics_say_what_offloading_holds() -> None:
    training = Training("all", SyncCopier())
    training.step()
    tracker = MemoryTracker("cpu")
    figures = memory_metrics(tracker, tracker.read())
    assert figures["memory/offload_gib"] >= training.offloader.stats.host_bytes_pinned / 2**30 > 0
    assert figures["memory/num_offload_allocations"] >= training.offloader.stats.num_host_allocations > 0
