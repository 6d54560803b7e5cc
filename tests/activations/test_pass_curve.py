"""Tests of memory over a pass: the curve's peak is the measured one, and plain memory that of keeping everything."""

import gc
import weakref
from typing import Any

import pytest
import torch
from tiny_decoders import tiny_decoder
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, SyncCopier

pytestmark = pytest.mark.usefixtures("quick_plans")

GIB = 2**30
MODES: dict[str, dict[str, Any]] = {
    "all": {"mode": "all"},
    "a tight budget": {"budget_gib": 0.0002},
    "the smallest": {"max_slowdown": 1e6},
}


def trained(offloader: ActivationOffloader, num_forwards: int = 1) -> ActivationOffloader:
    torch.manual_seed(0)
    model = tiny_decoder(num_hidden_layers=3)
    tokens = torch.randint(64, (2, 16))
    for _ in range(4):
        losses = [loss_of(offloader, model, tokens) for _ in range(num_forwards)]
        torch.stack(losses).sum().backward()
    return offloader


def loss_of(offloader: ActivationOffloader, model: nn.Module, tokens: Tensor) -> Tensor:
    with offloader.offload_context(model):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def offloader_of(**options: Any) -> ActivationOffloader:
    return ActivationOffloader(offload_threshold_mb=0.001, copier=SyncCopier(), **options)


@pytest.mark.parametrize("num_forwards", [1, 2])
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.sweep(share=0.4)
def test_plain_memory_is_that_of_a_pass_that_keeps_everything(options: dict[str, Any], num_forwards: int) -> None:
    keeping = trained(offloader_of(budget_gib=1.0), num_forwards)
    assert keeping.report().plans[0].plan.offloaded_bytes == 0
    offloader = trained(offloader_of(**options), num_forwards)
    assert offloader.stats.bytes_moved + offloader.stats.bytes_recomputed > 0
    assert offloader.stats.plain_peak_gib == keeping.stats.measured_peak_gib
    for each in (keeping, offloader):
        notes, num_forward = each.curve
        assert max(note.held for note in notes) == each.stats.measured_peak_gib * GIB
        assert max(note.plain for note in notes) == each.stats.plain_peak_gib * GIB
        rising = [note.plain for note in notes[:num_forward]]
        assert rising == sorted(rising)
        assert notes[-1].plain == 0


def test_a_graph_that_is_dropped_holds_nothing_more() -> None:
    offloader = offloader_of(mode="all")
    model, tokens = tiny_decoder(), torch.randint(64, (2, 16))
    loss_of(offloader, model, tokens)
    gc.collect()
    loss_of(offloader, model, tokens).backward()
    alone = offloader.stats.plain_peak_gib
    loss_of(offloader, model, tokens).backward()
    assert offloader.stats.plain_peak_gib == alone


def test_before_a_backward_the_curve_is_empty() -> None:
    offloader = offloader_of(mode="all")
    assert offloader.curve == ([], 0)
    assert offloader.stats.plain_peak_gib is None


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_a_small_last_batch_does_not_stand_for_the_run(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, offloader = tiny_decoder(num_hidden_layers=3), offloader_of(**options)
    tokens = torch.randint(64, (4, 16))
    for _ in range(4):
        loss_of(offloader, model, tokens).backward()
    whole_gib = offloader.stats.plain_peak_gib
    for _ in range(2):  # one of them may be plain, to compare times
        loss_of(offloader, model, tokens[:1]).backward()
    newest, largest = offloader.stats, offloader.stats_at_peak
    assert newest.plain_peak_gib < whole_gib == largest.plain_peak_gib
    assert largest.plain_peak_gib == max(note.plain for note in offloader.curve.notes) / GIB
    assert largest.measured_peak_gib == max(note.held for note in offloader.curve.notes) / GIB
    assert largest.bytes_moved == newest.bytes_moved


def test_recorded_passes_do_not_stand_for_a_plan() -> None:
    offloader = trained(offloader_of(budget_gib=1.0))
    assert offloader.stats_at_peak.predicted_peak_gib == offloader.stats_at_peak.measured_peak_gib
    assert offloader.stats_at_peak.measured_peak_gib == offloader.stats_at_peak.plain_peak_gib


def test_figures_outlive_the_model_and_hold_nothing_of_it() -> None:
    offloader = offloader_of(budget_gib=1.0)
    model, tokens = tiny_decoder(), torch.randint(64, (2, 16))
    for _ in range(4):
        loss_of(offloader, model, tokens).backward()
    weight = weakref.ref(model.get_parameter("lm_head.weight"))
    before = offloader.stats_at_peak
    del model
    gc.collect()
    assert weight() is None
    assert offloader.stats_at_peak == before
