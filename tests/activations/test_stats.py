"""Tests of an offloader's figures, counted by hand for a model of a few tensors."""

from dataclasses import FrozenInstanceError, asdict

import pytest
import torch
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.activations.stats import OffloadCounters

ROWS = 4 * 8 * 4  # bytes of x, of each layer's output, and of the square
THRESHOLD_MB = 100 / 2**20


def loss_of(model: nn.Sequential, x: Tensor) -> Tensor:
    """Return a loss that saves x, the first output twice, its square, the second weights and 16 bytes of `exp`."""
    hidden = model[0](x)
    return model[1](hidden * hidden).sum(1).exp().sum()


def test_every_saved_byte_is_counted_once_and_by_its_kind() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), torch.ones(4, 8)
    offloader = ActivationOffloader(offload_threshold_mb=THRESHOLD_MB, mode="all", copier=SyncCopier())
    assert not any(asdict(offloader.stats).values())
    allocations = []
    for num_steps in (1, 2, 3):
        with offloader.offload_context(model):
            loss = loss_of(model, x)
        during = offloader.stats
        assert during.host_bytes_pinned >= during.host_bytes_live >= 3 * ROWS
        assert (during.measured_peak_gib is None) == (during.measured_step_ms is None) == (num_steps == 1)
        loss.backward()
        stats = offloader.stats
        assert stats.bytes_moved == num_steps * 3 * ROWS
        assert stats.bytes_deduplicated == num_steps * ROWS
        assert stats.bytes_weights == num_steps * 8 * 8 * 4
        assert stats.bytes_kept == num_steps * 16
        assert stats.bytes_recomputed == stats.host_bytes_live == 0
        assert (stats.predicted_peak_gib, stats.predicted_step_ms) == (None, None)
        assert stats.measured_step_ms > 0
        allocations.append(stats.num_host_allocations)
    assert allocations[0] >= 1
    assert allocations[1:] == [allocations[0]] * 2


def test_figures_are_of_the_moment_they_were_asked_for() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(4, 8)
    offloader = ActivationOffloader(offload_threshold_mb=THRESHOLD_MB, mode="all", copier=SyncCopier())
    before = offloader.stats
    with offloader.offload_context(model):
        loss_of(model, x).backward()
    assert before.bytes_moved == 0 < offloader.stats.bytes_moved
    with pytest.raises(FrozenInstanceError):
        before.bytes_moved = 1  # type: ignore[misc]


def test_each_offloader_counts_for_itself() -> None:
    first, second = OffloadCounters(), OffloadCounters()
    first.subclasses.add("DTensor")
    first.bytes_kept += 1
    assert (second.bytes_kept, second.subclasses) == (0, set())
