"""Tests of mode "inputs", which moves only checkpointed blocks' inputs, and of labels, reports and log lines."""

import logging
from contextlib import nullcontext
from dataclasses import astuple

import pytest
import torch
from adversarial_copier import COPIERS
from gradients import equal, language_loss, take_gradients
from tiny_decoders import SHAPE, tiny_decoder
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from hf_memopt import ActivationOffloader, SyncCopier

pytestmark = pytest.mark.usefixtures("quick_plans")


@pytest.fixture
def decoder() -> nn.Module:
    return tiny_decoder(use_cache=False)


def gradients(model: nn.Module, tokens: Tensor, offloader: ActivationOffloader | None = None) -> list[Tensor]:
    with offloader.offload_context(model) if offloader else nullcontext():
        loss = language_loss(model, tokens)
    loss.backward()
    return take_gradients(model)


@pytest.mark.parametrize("copier", ["sync", "late"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_each_block_input_moves_once_and_nothing_else(
    decoder: nn.Module, tokens: Tensor, copier: str, use_reentrant: bool
) -> None:
    decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    decoder.enable_input_require_grads()
    want, input_bytes = gradients(decoder, tokens), tokens.numel() * SHAPE["hidden_size"] * 4
    offloader = ActivationOffloader(offload_threshold_mb=0.002, mode="inputs", copier=COPIERS[copier]())
    for step in range(1, 4):
        got = gradients(decoder, tokens, offloader)
        assert equal(got, want)
        # Rotary tables and masks, also inputs of every block, are below the threshold.
        assert offloader.stats.bytes_moved == step * SHAPE["num_hidden_layers"] * input_bytes
    assert offloader.stats.host_bytes_live == 0
    assert offloader.stats.measured_peak_gib <= 3 * input_bytes / 2**30


def test_without_checkpointing_nothing_moves(decoder: nn.Module, tokens: Tensor) -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0, mode="inputs", copier=SyncCopier())
    gradients(decoder, tokens, offloader)
    assert offloader.stats.bytes_moved == 0
    assert offloader.stats.bytes_kept > 0


def test_transfers_are_labelled_in_a_trace(decoder: nn.Module, tokens: Tensor) -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0, mode="all", copier=SyncCopier())
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        gradients(decoder, tokens, offloader)
    names = [event.name for event in trace.events() if event.name.startswith("hf_memopt::")]
    whats = {name.removeprefix("hf_memopt::").partition(" #")[0] for name in names}
    assert whats == {"offload", "wait for offload", "prefetch", "wait for prefetch"}
    assert all(name.endswith("MiB") for name in names)


def test_a_report_sums_what_kinds_of_modules_save(decoder: nn.Module, tokens: Tensor) -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0, max_slowdown=10, copier=SyncCopier())
    assert "no plan yet" in str(offloader.report())
    for _ in range(3):
        gradients(decoder, tokens, offloader)
    (report,) = offloader.report().plans
    owners = [row.owner for row in report.rows]
    assert "model.layers.*.mlp.down_proj" in owners
    assert len(owners) == len(set(owners)) < 20
    plan = report.plan
    assert sum(row.kept_bytes for row in report.rows) >= plan.kept_bytes
    assert sum(row.offloaded_bytes for row in report.rows) >= plan.offloaded_bytes
    (planner,) = offloader._planners[decoder].values()
    assert sum(sum(astuple(row)[1:]) for row in report.rows) == sum(planner.recording.sizes)
    lines = str(report).splitlines()
    assert lines[0].split() == ["saved", "by", "(MiB)", "kept", "offloaded", "recomputed"]
    assert [line.split()[0] for line in lines[1:-1]] == [owner.split()[0] for owner in owners]
    assert lines[-1] == plan.summary()


def test_a_threshold_that_nothing_reaches_is_said_once(
    decoder: nn.Module, tokens: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    offloader = ActivationOffloader(copier=SyncCopier())
    with caplog.at_level(logging.INFO, "hf_memopt"):
        for _ in range(3):
            gradients(decoder, tokens, offloader)
    assert [record.message for record in caplog.records if "reaches offload_threshold_mb=10" in record.message]
    assert len(caplog.records) == 1


def test_host_memory_that_only_recording_needed_is_given_back(decoder: nn.Module, tokens: Tensor) -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0, budget_gib=1, copier=SyncCopier())
    gradients(decoder, tokens, offloader)
    recording = offloader.stats.host_bytes_pinned
    for _ in range(3):
        gradients(decoder, tokens, offloader)
    # With this budget everything is kept.
    assert offloader.stats.host_bytes_pinned == 0 < recording


@pytest.mark.parametrize("freed", [False, True])
def test_weights_that_are_freed_after_backward_are_not_computed_from(freed: bool) -> None:
    """Free weights after backward, as sharded training does."""
    layer = nn.Linear(16, 16)
    offloader = ActivationOffloader(offload_threshold_mb=0, copier=SyncCopier())
    storage = layer.weight.untyped_storage()

    def free(weight: Tensor) -> None:
        storage.resize_(0)

    if freed:
        layer.weight.register_post_accumulate_grad_hook(free)
    with offloader.offload_context(layer):
        loss = layer(torch.randn(4, 16)).square().sum()
    loss.backward()
    (planner,) = offloader._planners[layer].values()
    planner.review()
    product = planner.recording.profile.storages[1]  # after the input
    assert (product.recompute_s is None) == freed
