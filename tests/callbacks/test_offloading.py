"""Tests that offloading in Trainer gives the plain run's weights, also after errors and retries."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from gradients import equal
from late_imports import LateModule
from offload_trainers import HOWS, SETTINGS, everything, packed, run, switch_on, weights
from torch import Tensor, nn

from hf_memopt import SyncCopier
from hf_memopt.activations import OffloadStats

callbacks = LateModule("hf_memopt.callbacks")
offloading = LateModule("hf_memopt.callbacks.offloading")
transformers = LateModule("transformers")


@pytest.mark.parametrize(
    ("settings", "offloads"),
    [
        *((settings, "sync") for settings in SETTINGS),
        ("fp32", "late"),
        *(pytest.param(settings, "late", marks=pytest.mark.slow) for settings in SETTINGS if settings != "fp32"),
    ],
)
@pytest.mark.sweep(share=0.4)
def test_weights_are_bitwise_those_of_the_plain_run(make: Any, settings: str, offloads: str) -> None:
    """Check dropout, accumulation, and evaluation and generation between the steps."""
    want, generated = run(make, "plain", everything(), **SETTINGS[settings])
    assert len(generated) == 3
    for how in HOWS:
        offloader = everything(AdversarialCopier("late") if offloads == "late" else SyncCopier())
        assert equal(run(make, how, offloader, **SETTINGS[settings])[0], want)
        assert offloader.stats.bytes_moved > 0
        assert offloader.stats.host_bytes_live == 0


@pytest.mark.parametrize("how", HOWS)
def test_generation_and_evaluation_are_the_plain_ones_and_pack_nothing(make: Any, how: str) -> None:
    _, want = run(make, "plain", everything())
    offloader = everything()
    assert run(make, how, offloader)[1] == want
    trainer = make()
    switch_on(how, trainer, offloader)
    before = packed(offloader)
    trainer.evaluate()
    assert packed(offloader) == before


def test_evaluation_enters_no_context(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offloader = everything()
    trainer = make()
    callbacks.attach(trainer, offloader=offloader)
    monkeypatch.setattr(offloader, "offload_context", lambda model: pytest.fail("entered"))
    trainer.evaluate()


def test_inputs_of_checkpointed_layers(make: Any) -> None:
    settings = SETTINGS["checkpointing"]
    want, _ = run(make, "plain", everything(), **settings)
    offloader = everything(mode="inputs")
    assert equal(run(make, "attach", offloader, **settings)[0], want)
    micro_batches, layers, bytes_of_input = 12, 2, 2 * 16 * 32 * 4
    assert offloader.stats.bytes_moved >= micro_batches * layers * bytes_of_input


@pytest.mark.parametrize("settings", ["fp32", "checkpointing"])
@pytest.mark.sweep(share=0.5)
def test_planned_offloading(make: Any, settings: str, caplog: pytest.LogCaptureFixture) -> None:
    """Compare with evaluations between recorded and planned passes."""
    caplog.set_level(logging.INFO, logger="hf_memopt")
    want, _ = run(make, "plain", everything(), **SETTINGS[settings])
    for how in HOWS:
        offloader = everything(mode="auto", budget_gib=100_000 / 2**30)
        assert equal(run(make, how, offloader, **SETTINGS[settings])[0], want)
        assert offloader.stats.bytes_moved > 0
        assert offloader.stats.predicted_peak_gib is not None
        assert offloader.stats.predicted_peak_gib <= 100_000 / 2**30
        assert offloader.stats.host_bytes_live == 0
    assert sum("KiB predicted" in record.message for record in caplog.records) == 2


class FailOnce:
    """A hook that raises once: in a layer's forward, or when backward reaches the layer's output."""

    def __init__(self, error: Callable[[], Exception], place: str, call: int) -> None:
        self.error, self.place, self.call = error, place, call
        self.calls = 0

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.calls += torch.is_grad_enabled()
        if self.calls != self.call or not torch.is_grad_enabled():
            return
        if self.place == "forward":
            raise self.error()
        output.register_hook(self._raise)

    def _raise(self, gradient: Tensor) -> None:
        raise self.error()


def fail_once(trainer: Any, error: Callable[[], Exception], place: str, call: int) -> None:
    trainer.model.model.layers[1].register_forward_hook(FailOnce(error, place, call))


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.sweep(share=0.5)
def test_training_goes_on_exactly_after_an_exception(make: Any, place: str) -> None:
    ends = []
    for how in ("plain", *HOWS):
        offloader = everything()
        trainer = make()
        switch_on(how, trainer, offloader)
        fail_once(trainer, lambda: KeyError("injected"), place, call=4)
        with pytest.raises(KeyError, match="injected"):
            trainer.train()
        before = packed(offloader)
        assert before > 0 or how == "plain"
        x = torch.randn(4, requires_grad=True)
        (x * x).sum().backward()
        assert packed(offloader) == before, "a hook is left"
        trainer.train()
        assert offloader.stats.host_bytes_live == 0
        assert not trainer.model._forward_pre_hooks
        ends.append(weights(trainer))
    assert all(equal(ends[0], each) for each in ends[1:])


def test_the_callback_leaves_the_model_when_told_to(make: Any) -> None:
    callback = callbacks.ActivationOffloadCallback(everything())
    trainer = make(callbacks=[callback])
    fail_once(trainer, lambda: KeyError("injected"), "forward", call=1)
    with pytest.raises(KeyError):
        trainer.train()
    assert trainer.model._forward_pre_hooks
    callback.remove()
    callback.remove()
    assert not trainer.model._forward_pre_hooks


def test_auto_find_batch_size_starts_over(make: Any) -> None:
    """Retry as Trainer does, which never reports the end of the first training."""
    ends = []
    for how in ("plain", *HOWS):
        offloader = everything()
        trainer = make(auto_find_batch_size=True, per_device_train_batch_size=4)
        switch_on(how, trainer, offloader)
        fail_once(trainer, lambda: RuntimeError("CUDA out of memory. Tried to allocate 1 GiB"), "backward", call=3)
        trainer.train()
        assert trainer._train_batch_size == 3
        assert offloader.stats.bytes_moved > 0 or how == "plain"
        assert offloader.stats.host_bytes_live == 0
        assert not trainer.model._forward_pre_hooks
        ends.append(weights(trainer))
    assert all(equal(ends[0], each) for each in ends[1:])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.sweep(share=0.5)
def test_a_resumed_run_is_the_uninterrupted_plain_one(make: Any, how: str, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = make(**saving, output_dir=str(tmp_path / "whole"))
    whole.train()
    first = make(**saving)
    switch_on(how, first, everything())
    first.train()
    resumed = make(**saving)
    offloader = everything()
    switch_on(how, resumed, offloader)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert offloader.stats.bytes_moved > 0
    assert equal(weights(resumed), weights(whole))


def test_the_end_of_training_says_what_was_moved(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hf_memopt")
    for how in HOWS:
        run(make, how, everything())
    lines = [record.message for record in caplog.records if "moved to the host" in record.message]
    assert len(lines) == 2


def test_a_mode_by_name_and_a_cpu_on_which_nothing_moves(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(max_steps=1)
    callbacks.attach(trainer, offloader="all")
    trainer.train()
    make(max_steps=1, callbacks=[callbacks.ActivationOffloadCallback("all", prefetch_ahead=1)]).train()
    assert caplog.text.count("activation offloading moved nothing") == 2


def test_nothing_is_said_to_be_at_fault_where_nothing_was_trained(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hf_memopt")
    offloading.log_what_was_done(everything())
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "no pass has saved anything" in record.message


def summary(stats: OffloadStats) -> str:
    return "; ".join(offloading.in_words(stats))


def test_the_summary_names_what_was_predicted_and_what_was_measured() -> None:
    counters = {"bytes_kept": 0, "bytes_deduplicated": 0, "host_bytes_live": 0, "num_host_allocations": 0}
    counters |= {"bytes_recomputed": 0, "bytes_weights": 0}
    no_disk = dict.fromkeys(("disk_bytes_live", "disk_bytes_held", "disk_bytes_written"), 0)
    moved = {"bytes_moved": 3 * 2**30, "host_bytes_pinned": 2**30, "stall_ms": 12.3}
    plan = {"predicted_peak_gib": 2.0, "predicted_step_ms": 100.0}
    measured = {"measured_peak_gib": 1.5, "plain_peak_gib": 4.0, "measured_step_ms": None}
    nothing = dict.fromkeys((*plan, *measured))
    plainly = "over the run 0 B kept, 3.00 GiB moved to the host; 1.00 GiB of host memory used; compute waited 12 ms"
    assert summary(OffloadStats(**counters, **no_disk, **moved, **nothing)) == plainly
    on_disk = {"disk_bytes_live": 0, "disk_bytes_held": 2**30, "disk_bytes_written": 2 * 2**30}
    assert summary(OffloadStats(**counters, **on_disk, **moved, **nothing)) == (
        "over the run 0 B kept, 3.00 GiB moved to host and disk; 1.00 GiB of host memory used; 1.00 GiB of "
        "disk used, 2.00 GiB written to the disk; compute waited 12 ms"
    )
    alone = summary(OffloadStats(**counters, **on_disk, **moved | {"host_bytes_pinned": 0}, **nothing))
    assert ", 3.00 GiB moved to the disk; 1.00 GiB of disk used" in alone
    assert summary(OffloadStats(**counters, **no_disk, **moved, **plan, **measured)) == (
        f"{plainly}; in a step: peak of saved activations 2.00 GiB predicted, 1.50 GiB measured, 4.00 GiB if all were "
        "kept; forward and backward 100 ms predicted"
    )
