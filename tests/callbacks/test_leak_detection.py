import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from torch import Tensor

from hf_memopt.memory.leaks.detect import MemoryLeakError

leak_detection = LateModule("hf_memopt.callbacks.memory_logging")
trainer_toys = LateModule("trainer_toys")
transformers = LateModule("transformers")


@pytest.fixture(scope="module", autouse=True)
def _frozen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide older objects from the collector, so that a search of all storages is fast."""
    make_trainer(transformers.Trainer, tmp_path_factory.mktemp("warm"), max_steps=1).train()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def make_trainer(kind: Any, folder: Path, *callbacks: Any, **options: Any) -> Any:
    """60 steps of two micro-batches, in epochs of 6 steps, evaluated every seventh step."""
    torch.manual_seed(0)
    data = [{"x": torch.randn(64), "labels": torch.randn(1)} for _ in range(24)]
    settings = (
        trainer_toys.SETTINGS
        | {
            "max_steps": 60,
            "eval_strategy": "steps",
            "eval_steps": 7,
            "logging_steps": 10,
            "disable_tqdm": True,
        }
        | options
    )
    arguments = transformers.TrainingArguments(str(folder), **settings)
    return kind(
        trainer_toys.Regression(64, 32, 1),
        arguments,
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=list(callbacks),
    )


def weights(trainer: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def test_a_leak_in_compute_loss_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = leak_detection.LeakDetectionCallback(every_n_steps=1)
    make_trainer(trainer_toys.LeakyTrainer, tmp_path, callback).train()
    assert callback.report() is not None
    largest = callback.report().culprits[0]
    assert largest.kind == "saved for backward"
    assert "self.kept[" in largest.held_by or ".kept[" in largest.held_by
    assert [record.getMessage() for record in caplog.records if "Memory leak" in record.getMessage()] == [
        str(callback.report())
    ]


def test_raises_if_asked(tmp_path: Path) -> None:
    callback = leak_detection.LeakDetectionCallback(every_n_steps=1, action="raise")
    with pytest.raises(MemoryLeakError, match=r"kept\["):
        make_trainer(trainer_toys.LeakyTrainer, tmp_path, callback).train()


@pytest.mark.parametrize("collects", [True, False], ids=["gc", "no_gc"])
def test_a_sound_training_is_left_alone(tmp_path: Path, collects: bool) -> None:
    """Check bitwise equal weights and no alarm, with accumulation, evaluation and a tensor kept per epoch."""
    plain = make_trainer(transformers.Trainer, tmp_path, trainer_toys.KeptPerEpoch())
    plain.train()
    callback, kept = leak_detection.LeakDetectionCallback(every_n_steps=1), trainer_toys.KeptPerEpoch()
    watched = make_trainer(transformers.Trainer, tmp_path, callback, kept)
    if not collects:
        gc.disable()
    try:
        watched.train()
    finally:
        gc.enable()
    assert callback.report() is None
    assert len(kept.kept) == 10
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(watched), strict=True))


def test_counts_anew_when_training_begins_again(tmp_path: Path) -> None:
    """Restart training before it has ended, as auto_find_batch_size does, and resume."""
    callback = leak_detection.LeakDetectionCallback(every_n_steps=1)
    trainer = make_trainer(
        trainer_toys.LeakyTrainer, tmp_path, callback, max_steps=30, save_strategy="steps", save_steps=30
    )
    trainer.train()
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert callback.report() is None
    trainer.args.max_steps = 60
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-30"))
    assert callback.report() is None  # 30 steps in each of the two runs are too few for a verdict
    assert len(trainer.kept) >= 120


def test_options_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="action='stop' is unknown"):
        leak_detection.LeakDetectionCallback(action="stop")
