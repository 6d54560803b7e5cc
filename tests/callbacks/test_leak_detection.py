"""LeakDetectionCallback in a real Trainer on the CPU."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_memopt.callbacks.leak_detection import LeakDetectionCallback
from hf_memopt.memory.leaks.detect import MemoryLeakError


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 32)
        self.down = nn.Linear(32, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        prediction = self.down(torch.dropout(self.up(x).relu(), 0.1, self.training))
        return {"loss": (prediction - labels).square().mean(), "logits": prediction}


class LeakyTrainer(Trainer):
    """Keeps every loss with its graph, whose nodes hold the activations of what has no backward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[Tensor] = []

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        self.kept.append(model(**inputs)["loss"])
        return super().compute_loss(model, inputs, *args, **kwargs)


class KeptPerEpoch(TrainerCallback):
    """What a user keeps on purpose."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        self.kept.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


@pytest.fixture(scope="module", autouse=True)
def _frozen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is older than this module is hidden, so that looking at all storages is fast."""
    make_trainer(Trainer, tmp_path_factory.mktemp("warm"), max_steps=1).train()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def make_trainer(kind: type[Trainer], folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    """60 optimizer steps of two micro-batches in epochs of 6 steps, an evaluation every seventh step."""
    torch.manual_seed(0)
    data = [{"x": torch.randn(64), "labels": torch.randn(1)} for _ in range(24)]
    settings: dict[str, Any] = {
        "max_steps": 60,
        "eval_strategy": "steps",
        "eval_steps": 7,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    } | options
    arguments = TrainingArguments(str(folder), **settings)
    return kind(Regression(), arguments, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks))


def weights(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def test_a_leak_in_compute_loss_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = LeakDetectionCallback(every_n_steps=1)
    make_trainer(LeakyTrainer, tmp_path, callback).train()
    assert callback.report() is not None
    largest = callback.report().culprits[0]
    assert largest.kind == "saved for backward"
    assert "self.kept[" in largest.held_by or ".kept[" in largest.held_by
    assert [record.getMessage() for record in caplog.records if "Memory leak" in record.getMessage()] == [
        str(callback.report())
    ]


def test_raises_if_asked(tmp_path: Path) -> None:
    callback = LeakDetectionCallback(every_n_steps=1, action="raise")
    with pytest.raises(MemoryLeakError, match=r"kept\["):
        make_trainer(LeakyTrainer, tmp_path, callback).train()


@pytest.mark.parametrize("collects", [True, False], ids=["gc", "no_gc"])
def test_a_sound_training_is_left_alone(tmp_path: Path, collects: bool) -> None:
    """Bitwise the same weights with accumulation, evaluation and something kept per epoch; and no alarm."""
    plain = make_trainer(Trainer, tmp_path, KeptPerEpoch())
    plain.train()
    callback, kept = LeakDetectionCallback(every_n_steps=1), KeptPerEpoch()
    watched = make_trainer(Trainer, tmp_path, callback, kept)
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
    """As auto_find_batch_size does, without an end in between, and as resuming does."""
    callback = LeakDetectionCallback(every_n_steps=1)
    trainer = make_trainer(LeakyTrainer, tmp_path, callback, max_steps=30, save_strategy="steps", save_steps=30)
    trainer.train()
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert callback.report() is None
    trainer.args.max_steps = 60
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-30"))
    assert callback.report() is None  # 30 steps in each of the two runs are too few for a verdict
    assert len(trainer.kept) >= 120


def test_options_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="action='stop' is unknown"):
        LeakDetectionCallback(action="stop")
