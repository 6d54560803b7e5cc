import copy
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_allocator import CountedAllocator, FakeCounters
from late_imports import LateModule
from tensorboard_runs import scalars
from torch import Tensor, nn

from hf_memopt.memory import MemoryTracker

memory_logging = LateModule("hf_memopt.callbacks.memory_logging")
trainer_toys = LateModule("trainer_toys")
transformers = LateModule("transformers")


GIB = 2**30


def make_trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    """Four steps of two micro-batches, with a log and an evaluation every second step."""
    torch.manual_seed(0)
    data = [{"x": torch.randn(8), "labels": torch.randn(2)} for _ in range(16)]
    settings = (
        trainer_toys.SETTINGS
        | {
            "max_steps": 4,
            "logging_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
        }
        | options
    )
    arguments = transformers.TrainingArguments(str(folder), **settings)
    return transformers.Trainer(
        trainer_toys.Regression(), arguments, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks)
    )


def train_counted(folder: Path, **options: Any) -> tuple[Any, CountedAllocator, MemoryTracker]:
    """Train with tensors charged to an allocator that the callback reads."""
    with CountedAllocator(total_bytes=10 * GIB) as allocator:
        callback = memory_logging.MemoryLoggingCallback(counters=allocator, **options)
        trainer = make_trainer(folder, callback)
        allocator.charge(trainer.model.parameters())
        trainer.train()
    assert callback.tracker is not None
    return trainer, allocator, callback.tracker


def weights(trainer: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def num_hooks(trainer: Any) -> int:
    return len(trainer.model._forward_hooks) + len(trainer.model._forward_pre_hooks)


@pytest.fixture
def tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    return tmp_path / "tensorboard"


def test_metrics_reach_tensorboard_and_the_history(tmp_path: Path, tensorboard: Path) -> None:
    counters = FakeCounters(total_bytes=10 * GIB)
    counters.move(3 * GIB)
    counters.elsewhere_bytes = GIB
    trainer = make_trainer(tmp_path, memory_logging.MemoryLoggingCallback(counters=counters), report_to=["tensorboard"])
    counters.move(-GIB)
    trainer.train()
    wanted = {"peak_allocated": 3.0, "allocated": 2.0, "reserved": 3.0, "fragmentation": 1.0, "elsewhere": 1.0}
    recorded = scalars(tensorboard)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in history] == [2, 4]
    for name, value in wanted.items():
        assert recorded[f"train/memory/{name}_gib"] == [(2, value), (4, value)]
        assert all(entry[f"memory/{name}_gib"] == value for entry in history)
    assert all(0 < entry["memory/host_rss_gib"] < 100 for entry in history)
    assert not any("memory" in key for entry in trainer.state.log_history if "eval_loss" in entry for key in entry)
    assert counters.num_resets == 0


def test_the_four_phases_are_told_apart_to_the_byte(tmp_path: Path) -> None:
    trainer, allocator, tracker = train_counted(tmp_path, reset_peaks=True)
    peaks = {name: peak.at_most_bytes for name, peak in tracker.peaks.items()}
    assert set(peaks) == {"forward", "backward", "optimizer", "evaluation"}
    assert all(peak.exact for peak in tracker.peaks.values())
    assert len(set(peaks.values())) == 4
    # No large tensor is made between the phases, so the highest phase has the peak of the whole run.
    assert max(peaks.values()) == max(allocator.timeline)
    # Gradients exist from the first backward on, and Adam's state from the first optimizer step on.
    parameter_bytes = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert peaks["optimizer"] > 4 * parameter_bytes
    assert tracker.num_steps == 4
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert last["memory/optimizer_peak_gib"] == peaks["optimizer"] / GIB


def test_a_shared_counter_gives_bounds(tmp_path: Path) -> None:
    trainer, allocator, tracker = train_counted(tmp_path)
    assert allocator.num_resets == 0
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert last[f"memory/{tracker.peak_phase}_peak_gib"] == max(allocator.timeline) / GIB
    assert 0 < last["memory/forward_peak_at_least_gib"] < last["memory/forward_peak_at_most_gib"]


def test_training_is_bitwise_unchanged(tmp_path: Path) -> None:
    plain = make_trainer(tmp_path)
    plain.train()
    watched = make_trainer(tmp_path, memory_logging.MemoryLoggingCallback())
    watched.train()
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(watched), strict=True))
    losses = [
        [(entry.get("loss"), entry.get("grad_norm"), entry.get("eval_loss")) for entry in trainer.state.log_history]
        for trainer in (plain, watched)
    ]
    assert losses[0] == losses[1]
    assert num_hooks(watched) == 0


def test_going_first_skips_and_repeats_nobody(tmp_path: Path) -> None:
    before, after = trainer_toys.FirstRecorder(), trainer_toys.EventRecorder()
    trainer = make_trainer(tmp_path, before, memory_logging.MemoryLoggingCallback(), after)
    assert type(trainer.callback_handler.callbacks[0]) is memory_logging.MemoryLoggingCallback
    trainer.train()
    assert before.events == after.events
    assert before.events.count("on_init_end") == before.events.count("on_train_begin") == 1
    assert len(trainer.callback_handler.callbacks) == len(set(map(id, trainer.callback_handler.callbacks)))


def test_a_callback_added_later_goes_first_when_training_begins(tmp_path: Path, tensorboard: Path) -> None:
    trainer = make_trainer(tmp_path, report_to=["tensorboard"])
    trainer.add_callback(memory_logging.MemoryLoggingCallback())
    trainer.train()
    assert "train/memory/host_rss_gib" in scalars(tensorboard)


def test_outside_of_a_trainer_it_says_that_figures_get_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path)
    memory_logging.MemoryLoggingCallback().on_init_end(trainer.args, trainer.state, trainer.control)
    assert "memory figures reach no experiment tracker" in caplog.text


def test_the_progress_bar_and_the_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    postfixes = []

    class Reader(transformers.ProgressCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_step_end(*args, **kwargs)
            postfixes.append(self.training_bar.postfix)

    counters = FakeCounters(total_bytes=100 * GIB)
    counters.move(14_200_000_000)
    trainer = make_trainer(tmp_path, memory_logging.MemoryLoggingCallback(counters=counters), disable_tqdm=True)
    trainer.add_callback(Reader())
    with caplog.at_level(logging.INFO, logger="hf_memopt"):
        trainer.train()
    assert postfixes == ["GPU: 14.2GB"] * 4
    lines = [record.getMessage() for record in caplog.records if "batch" in record.getMessage()]
    assert len(lines) == 2
    assert re.fullmatch(r"step 2/4 \| \d+\.\ds/batch \| GPU: 14\.2GB \| ETA: \d\d:\d\d:\d\d", lines[0])
    assert lines[1].endswith("ETA: 00:00:00")


def test_the_clock_counts_batches_and_leaves_evaluation_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr("hf_memopt.callbacks.memory_logging.time.monotonic", lambda: now[0])

    class Slow(transformers.TrainerCallback):
        """A clock by which a batch takes 3 s and an evaluation 1000 s."""

        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            now[0] += 3

        on_pre_optimizer_step = on_substep_end

        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            now[0] += 1000

    trainer = make_trainer(
        tmp_path, memory_logging.MemoryLoggingCallback(), Slow(), eval_steps=1, per_device_eval_batch_size=4
    )
    with caplog.at_level(logging.INFO, logger="hf_memopt"):
        trainer.train()
    lines = [record.getMessage() for record in caplog.records if "batch" in record.getMessage()]
    assert all("| 3.0s/batch |" in line for line in lines)
    # One evaluation and two steps of two batches so far: 1012 s for two steps, and two steps remain.
    assert lines[0].endswith("ETA: 00:16:52")


def test_a_resumed_run_estimates_from_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("hf_memopt.callbacks.memory_logging.time.monotonic", lambda: now[0])
    clock = memory_logging._Clock()
    clock.start(6)
    now[0] += 10
    clock.count_batch()
    line = clock.line(transformers.TrainerState(global_step=8, max_steps=10), "GPU: 1.0GB")
    assert line == "step 8/10 | 10.0s/batch | GPU: 1.0GB | ETA: 00:00:10"


def test_a_warning_is_given_once_with_what_to_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counters = FakeCounters(total_bytes=25 * GIB)
    counters.elsewhere_bytes = 3 * GIB
    counters.move(18 * GIB)
    below = make_trainer(tmp_path, memory_logging.MemoryLoggingCallback(counters=counters))
    below.train()
    assert "high device memory" not in caplog.text
    counters.move(GIB)
    above = make_trainer(tmp_path, memory_logging.MemoryLoggingCallback(counters=counters))
    above.train()
    (warning,) = [record for record in caplog.records if "high device memory" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    assert "19.00 of 22.00 GiB (86%) at the peak" in warning.getMessage()


def test_resuming_goes_on_with_the_same_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = make_trainer(tmp_path / "whole", memory_logging.MemoryLoggingCallback())
    whole.train()
    make_trainer(tmp_path / "run", memory_logging.MemoryLoggingCallback(), save_strategy="steps", save_steps=2).train()
    resumed = make_trainer(tmp_path / "run", memory_logging.MemoryLoggingCallback())
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="hf_memopt"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    assert sum("step 4/4" in record.getMessage() for record in caplog.records) == 1
    assert [entry["step"] for entry in resumed.state.log_history if "memory/host_rss_gib" in entry] == [2, 4]


def test_training_again_after_an_exception(tmp_path: Path) -> None:
    callback = memory_logging.MemoryLoggingCallback()
    trainer = make_trainer(tmp_path, callback, trainer_toys.FailsOnce(KeyError("planted")))
    with pytest.raises(KeyError, match="planted"):
        trainer.train()
    assert num_hooks(trainer) == 2
    trainer.train()
    assert num_hooks(trainer) == 0
    assert trainer.callback_handler.callbacks.count(callback) == 1
    assert trainer.state.log_history[0]["memory/host_rss_gib"] > 0


def test_a_retry_with_smaller_batches(tmp_path: Path) -> None:
    # On a retry train() starts a second time before the first training has ended.
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    trainer = make_trainer(
        tmp_path, memory_logging.MemoryLoggingCallback(), trainer_toys.FailsOnce(error), auto_find_batch_size=True
    )
    trainer.train()
    assert trainer._train_batch_size == 1
    assert num_hooks(trainer) == 0
    assert [entry["step"] for entry in trainer.state.log_history if "memory/host_rss_gib" in entry] == [2, 4]


def test_copies_of_the_model_are_not_watched(tmp_path: Path) -> None:
    callback = memory_logging.MemoryLoggingCallback()
    copies: list[nn.Module] = []

    class Copier(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
            copies.append(copy.deepcopy(model))
            copies.append(pickle.loads(pickle.dumps(model)))

    make_trainer(tmp_path, callback, Copier(), max_steps=1).train()
    assert callback.tracker is not None
    callback.tracker.switch_to(None)
    for model in copies:
        model(torch.zeros(1, 8), torch.zeros(1, 2))
        assert callback.tracker._open == []


def test_evaluation_alone_needs_no_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, memory_logging.MemoryLoggingCallback())
    assert "eval_loss" in trainer.evaluate()


def test_a_model_to_be_compiled_is_left_alone(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.args.torch_compile = True
    memory_logging.MemoryLoggingCallback().on_train_begin(
        trainer.args, trainer.state, trainer.control, model=trainer.model
    )
    assert num_hooks(trainer) == 0


def test_resetting_refuses_to_disturb_trainers_own_figures(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, memory_logging.MemoryLoggingCallback(reset_peaks=True), skip_memory_metrics=False)
    with pytest.raises(ValueError, match=r"reset_peaks=True .* skip_memory_metrics=False"):
        trainer.train()


@pytest.mark.parametrize("warn_at", [0, -0.1, 1.5])
def test_a_share_outside_of_its_range_is_refused(warn_at: float) -> None:
    with pytest.raises(ValueError, match=f"warn_at={warn_at} must be"):
        memory_logging.MemoryLoggingCallback(warn_at=warn_at)
