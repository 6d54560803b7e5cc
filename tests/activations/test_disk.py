"""Tests of a disk below the device: the same bits in every mode and schedule, and an error for each fault."""

import copy
import errno
import gc
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import COPIERS, AdversarialCopier
from adversarial_file import SCHEDULES, AdversarialFile
from gradients import equal, language_loss, take_gradients
from tiny_decoders import tiny_decoder
from torch import Tensor, nn

from hf_memopt import ActivationOffloader
from hf_memopt.transfer import scratch_file as scratch_file_module
from hf_memopt.transfer.scratch_file import DiskError, ScratchFile

pytestmark = pytest.mark.usefixtures("quick_plans")

Make = Callable[..., ActivationOffloader]
NUM_STEPS = 5


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that makes offloaders with an adversarial disk, whose options are `file`."""

    def make(file: dict[str, Any] | None = None, **options: Any) -> ActivationOffloader:
        monkeypatch.setattr(
            scratch_file_module, "ScratchFile", lambda folder, budget: AdversarialFile(folder, budget, **(file or {}))
        )
        return ActivationOffloader(**{"offload_threshold_mb": 0, "mode": "all", "disk": tmp_path, **options})

    return make


def step(model: nn.Module, tokens: Tensor, offloader: ActivationOffloader | None = None) -> list[Tensor]:
    with offloader.offload_context(model) if offloader else nullcontext():
        loss = language_loss(model, tokens)
    loss.backward()
    return [loss.detach(), *take_gradients(model)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "all"},
        {"mode": "all", "prefetch_ahead": 0},
        {"mode": "auto", "max_slowdown": 10.0},
        {"mode": "auto", "max_slowdown": 0.0},
        {"mode": "auto", "budget_gib": 1e-4},
    ],
    ids=str,
)
@pytest.mark.sweep(share=0.25)
def test_gradients_are_those_of_the_plain_run(
    decoder: nn.Module, tokens: Tensor, on_disk: Make, schedule: str, options: dict[str, Any]
) -> None:
    want = step(decoder, tokens)
    offloader = on_disk({"schedule": schedule}, **options)
    for _ in range(NUM_STEPS):
        assert equal(step(decoder, tokens, offloader), want)
    stats = offloader.stats
    assert stats.disk_bytes_live == 0
    assert stats.disk_bytes_written >= stats.bytes_moved > 0
    assert stats.host_bytes_pinned == 0
    if "budget_gib" in options:
        assert stats.measured_peak_gib == stats.predicted_peak_gib <= options["budget_gib"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inputs_of_checkpointed_blocks_go_to_the_disk(
    decoder: nn.Module, tokens: Tensor, on_disk: Make, use_reentrant: bool
) -> None:
    decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    decoder.enable_input_require_grads()
    want = step(decoder, tokens)
    offloader = on_disk({"schedule": "random"}, mode="inputs")
    for _ in range(3):
        assert equal(step(decoder, tokens, offloader), want)
    assert offloader.stats.bytes_moved > 0


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [{"mode": "all"}, {"mode": "auto", "budget_gib": 1e-4}], ids=str)
@pytest.mark.sweep(share=0.15)
def test_beyond_the_hosts_budget_storages_go_to_the_disk(
    decoder: nn.Module, tokens: Tensor, on_disk: Make, copier: str, schedule: str, options: dict[str, Any]
) -> None:
    want = step(decoder, tokens)
    offloader = on_disk({"schedule": schedule}, copier=COPIERS[copier](), host_budget_gib=2e-4, **options)
    for _ in range(NUM_STEPS):
        assert equal(step(decoder, tokens, offloader), want)
    stats = offloader.stats
    assert stats.disk_bytes_written > 0
    assert 0 < stats.host_bytes_pinned <= 2e-4 * 2**30
    assert (stats.host_bytes_live, stats.disk_bytes_live) == (0, 0)


def test_a_real_file_serves_as_well(decoder: nn.Module, tokens: Tensor, tmp_path: Path) -> None:
    want = step(decoder, tokens)
    for copier in (None, AdversarialCopier("random")):
        offloader = ActivationOffloader(
            offload_threshold_mb=0, mode="all", disk=tmp_path, copier=copier, host_budget_gib=2e-4
        )
        for _ in range(3):
            assert equal(step(decoder, tokens, offloader), want)
        assert offloader.stats.disk_bytes_written > 0
        assert os.listdir(tmp_path) == []


def test_without_room_on_the_disk_storages_stay(decoder: nn.Module, tokens: Tensor, on_disk: Make) -> None:
    want = step(decoder, tokens)
    offloader = on_disk({"schedule": "random"}, disk_budget_gib=1e-4)
    for _ in range(3):
        assert equal(step(decoder, tokens, offloader), want)
    assert offloader.stats.disk_bytes_held <= 1e-4 * 2**30
    assert offloader.stats.measured_peak_gib > 1e-4


def test_graphs_used_twice_or_dropped_give_their_space_back(decoder: nn.Module, tokens: Tensor, on_disk: Make) -> None:
    offloader = on_disk({"schedule": "late"})

    def backward_twice(context: Any) -> list[Tensor]:
        with context:
            loss = language_loss(decoder, tokens)
        loss.backward(retain_graph=True)
        loss.backward()
        return take_gradients(decoder)

    want = backward_twice(nullcontext())
    assert equal(backward_twice(offloader.offload_context(decoder)), want)
    with offloader.offload_context(decoder):
        loss = language_loss(decoder, tokens)
    assert offloader.stats.disk_bytes_live > 0
    del loss
    gc.collect()
    assert offloader.stats.disk_bytes_live == 0


# ------------------------------------------------------------------------------------------------------------- faults


def faults(on_disk: Make, decoder: nn.Module, tokens: Tensor, **options: Any) -> Iterator[tuple[str, bool]]:
    """Fail each operation of a step once; yields the error's text, empty for none, and whether the step was right."""
    want = step(decoder, tokens)
    counting = on_disk({"schedule": "late"}, **options)
    step(decoder, tokens, counting)
    assert isinstance(counting._file, AdversarialFile)
    for number in range(1, counting._file.num_operations + 1):
        offloader = on_disk({"schedule": "late", "fail_at": number, "number": errno.ENOSPC}, **options)
        try:
            error, got = "", step(decoder, tokens, offloader)
        except DiskError as raised:
            error, got = str(raised), want
            decoder.zero_grad()
        if not error:  # the bytes were not needed, and the error has to be raised all the same
            with pytest.raises(DiskError), offloader.offload_context(decoder):
                pass
        yield error, equal(got, want)
        assert equal(step(decoder, tokens, offloader), want), f"the step after operation {number} failed"
        assert (offloader.stats.disk_bytes_live, offloader.stats.host_bytes_live) == (0, 0)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "options", [{}, {"copier": AdversarialCopier("random"), "host_budget_gib": 1e-4}], ids=["direct", "staged"]
)
def test_each_operation_may_fail_once(tokens: Tensor, on_disk: Make, tmp_path: Path, options: dict[str, Any]) -> None:
    failed = told = 0
    for error, is_right in faults(on_disk, tiny_decoder(num_hidden_layers=1), tokens, **options):
        assert is_right
        failed, told = failed + 1, told + bool(error)
        assert not error or (str(tmp_path) in error and "No space left" in error and "iB" in error)
    assert told > 5
    print(f"{failed} operations failed, {told} in a step that needed their bytes")


def test_a_failed_write_that_backward_has_overtaken_is_raised(on_disk: Make) -> None:
    offloader = on_disk({"schedule": "late", "fail_at": 2})  # the first one lengthens the file
    weight = torch.randn(64, 64, requires_grad=True)
    with offloader.offload_context():
        loss = (weight.exp()).sum()
    with pytest.raises(DiskError, match="writing"):
        loss.backward()
    with offloader.offload_context():
        loss = (weight.exp()).sum()
    weight.grad = None
    loss.backward()
    assert torch.equal(weight.grad, weight.detach().exp())


@pytest.mark.e2e
@pytest.mark.slow
def test_3000_steps_of_random_sizes_hold_their_space(tmp_path: Path) -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0, mode="all", disk=tmp_path)
    dice, weight = random.Random(0), torch.randn(8, requires_grad=True)
    largest = held = 0
    for _ in range(3000):
        sizes = [dice.randint(1, 4000) for _ in range(4)]
        with offloader.offload_context():
            loss = sum((torch.ones(size, 8) * weight).exp().sum() for size in sizes)
            largest = max(largest, offloader.stats.disk_bytes_live)
        loss.backward()
        held = max(held, offloader.stats.disk_bytes_held)
    assert held <= 1.5 * largest
    assert offloader.stats.disk_bytes_live == 0


# ------------------------------------------------------------------------------------------------------- other things


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"disk='.*missing' is no folder"):
        ActivationOffloader(disk=tmp_path / "missing")
    with pytest.raises(ValueError, match=r"disk_budget_gib=1 needs disk"):
        ActivationOffloader(disk_budget_gib=1)
    with pytest.raises(ValueError, match=r"disk_budget_gib=-1"):
        ActivationOffloader(disk=tmp_path, disk_budget_gib=-1)


def test_a_folder_that_has_vanished_is_named_and_the_next_step_tries_again(
    decoder: nn.Module, tokens: Tensor, tmp_path: Path
) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    offloader = ActivationOffloader(offload_threshold_mb=0, mode="all", disk=folder)
    folder.rmdir()
    with pytest.raises(DiskError, match=rf"disk={folder}: cannot make a file: No such file or directory"):
        step(decoder, tokens, offloader)
    folder.mkdir()
    assert equal(step(decoder, tokens, offloader), step(decoder, tokens))


def test_report_and_log_tell_the_wear(
    decoder: nn.Module, tokens: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    offloader = ActivationOffloader(offload_threshold_mb=0, max_slowdown=10.0, disk=tmp_path)
    for _ in range(10):
        step(decoder, tokens, offloader)
    assert len([record for record in caplog.records if "TB per day" in record.message]) == 1
    report = str(offloader.report())
    assert "offloaded to disk" in report
    assert f"disk={tmp_path}: " in report
    assert "TB per day" in report


def test_a_copy_of_the_offloader_has_a_file_of_its_own(decoder: nn.Module, tokens: Tensor, tmp_path: Path) -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0, mode="all", disk=tmp_path)
    step(decoder, tokens, offloader)
    other = copy.deepcopy(offloader)
    step(decoder, tokens, other)
    assert isinstance(other._file, ScratchFile)
    assert other._file is not offloader._file
