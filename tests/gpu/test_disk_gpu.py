"""Tests of device, host and disk together on a GPU: gradients, where the bytes go, faults of the disk."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda.device import is_loaded
from torch import Tensor, nn

from hf_memopt import ActivationOffloader
from hf_memopt.memory import SavedBytes
from hf_memopt.transfer.scratch_file import DiskError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH = 128 if is_loaded() else 512  # a fake GPU is as slow as a CPU
NUM_PASSES = 6
Gradients = list[Tensor]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*(nn.Sequential(block, nn.Linear(4 * WIDTH, WIDTH)) for block in blocks)).cuda()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2048, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()


def gradients(model: nn.Module, x: Tensor, offloader: ActivationOffloader | None = None) -> Gradients:
    with offloader.offload_context(model) if offloader else nullcontext():
        loss = model(x).square().mean()
    torch.full((2**22,), float("nan"), device="cuda")  # overwrites memory that was released
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    with SavedBytes(exclude=model.parameters()) as saved:
        model(x).square().mean()
    return saved.total_bytes


def three_tiers(model: nn.Module, x: Tensor, folder: Path, **options: Any) -> ActivationOffloader:
    """Return an offloader whose host has room for about half of the saved bytes."""
    host_budget_gib = 0.6 * saved_bytes(model, x) / 2**30
    return ActivationOffloader(offload_threshold_mb=0.5, disk=folder, host_budget_gib=host_budget_gib, **options)


@pytest.mark.parametrize("mode", ["all", "auto"])
def test_gradients_are_bitwise_the_plain_ones(model: nn.Module, x: Tensor, tmp_path: Path, mode: str) -> None:
    want = gradients(model, x)
    budget = {"budget_gib": 0.4 * saved_bytes(model, x) / 2**30} if mode == "auto" else {}
    offloader = three_tiers(model, x, tmp_path, mode=mode, **budget)
    for _ in range(NUM_PASSES):
        got = gradients(model, x, offloader)
        assert all(map(torch.equal, got, want))
    stats = offloader.stats
    assert stats.disk_bytes_written > 0
    assert stats.host_bytes_pinned > 0
    assert (stats.host_bytes_live, stats.disk_bytes_live) == (0, 0)
    if mode == "auto":
        assert stats.measured_peak_gib == stats.predicted_peak_gib <= budget["budget_gib"]
    assert os.listdir(tmp_path) == []


def test_an_error_of_the_disk_reaches_the_step_and_the_next_one_is_right(
    model: nn.Module, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = gradients(model, x)
    offloader = three_tiers(model, x, tmp_path, mode="all")
    gradients(model, x, offloader)

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "injected")

    for name in ("pwritev", "preadv"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail)
            with pytest.raises(DiskError, match="Input/output error"):
                gradients(model, x, offloader)
        model.zero_grad()
        assert all(map(torch.equal, gradients(model, x, offloader), want))
        assert (offloader.stats.host_bytes_live, offloader.stats.disk_bytes_live) == (0, 0)


def test_memory_that_is_the_hosts_goes_to_the_disk_alone(
    model: nn.Module, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_memopt.transfer.memories_below.computes_in_host_memory", lambda device: True)
    want = gradients(model, x)
    offloader = three_tiers(model, x, tmp_path, mode="all")
    for _ in range(3):
        assert all(map(torch.equal, gradients(model, x, offloader), want))
    staging_bytes = offloader.stats.host_bytes_pinned
    assert 0 < staging_bytes <= 0.25 * 0.6 * saved_bytes(model, x)
    assert offloader.stats.disk_bytes_written > 0
