"""Tests of `attach(trainer, optimizer_home=...)`: training, checkpoints, resuming and refusals."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from offload_trainers import decoder
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_memopt import OffloadedOptimizer
from hf_memopt.report.offloading import OFFLOADING_FILE, OffloadingRecord

callbacks = LateModule("hf_memopt.callbacks")
transformers = LateModule("transformers")

HOMES = ["host", "file"]
ALONE: dict[str, Any] = {"offloader": None, "memory": False}
# The first checkpoint, of two, is the best one: its metric falls.
STEPS: dict[str, Any] = {
    "max_steps": 4,
    "max_grad_norm": 0.1,
    "lr_scheduler_type": "linear",
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
}


def saved(folder: Path, step: int) -> list[Any]:
    from safetensors.torch import load_file

    checkpoint = folder / f"checkpoint-{step}"
    loaded = [torch.load(checkpoint / name) for name in ("optimizer.pt", "scheduler.pt")]
    return tree_leaves([load_file(checkpoint / "model.safetensors"), *loaded])


def same(found: list[Any], want: list[Any]) -> bool:
    return len(found) == len(want) and all(
        torch.equal(one, other) if isinstance(one, Tensor) else one == other
        for one, other in zip(found, want, strict=True)
    )


def weights(trainer: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.fixture
def plain(make: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    make(output_dir=str(folder), **STEPS).train()
    return folder


@pytest.mark.parametrize("home", HOMES)
def test_checkpoints_and_resumed_runs_are_bitwise_the_plain_ones(
    home: str, make: Any, plain: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "away", tmp_path / "resumed"]
    resumed_from = [None, str(folders[0] / "checkpoint-2")]
    for folder, checkpoint in zip(folders, resumed_from, strict=True):
        trainer = make(output_dir=str(folder), **STEPS)
        callbacks.attach(trainer, optimizer_home=home, optimizer_disk=tmp_path, **ALONE)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert same(saved(folder, 4), saved(plain, 4))
    assert same(saved(folders[0], 2), saved(plain, 2))
    assert trainer.state.best_model_checkpoint is not None
    report = trainer.optimizer.optimizer.report()
    assert (report.num_updates, report.home) == (2, home)
    assert min(report.bytes_read, report.bytes_written) >= report.state_bytes > report.peak_bytes > 0
    assert (str(tmp_path) in report.wear) == (home == "file")


def with_own_optimizer(make: Any) -> Any:
    trainer = make(save_strategy="no", max_steps=3)
    trainer.optimizer = torch.optim.Adagrad(trainer.model.parameters(), lr=0.1)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LinearLR(trainer.optimizer, 1.0, 0.1, 3)
    return trainer


def test_an_optimizer_of_the_users_moves_too_and_another_train_goes_on_with_it(make: Any) -> None:
    states = []
    for is_away in (False, True):
        trainer = with_own_optimizer(make)
        handle = callbacks.attach(trainer, optimizer_home="host", **ALONE) if is_away else None
        trainer.train()
        trainer.args.max_steps = 5
        trainer.train()
        states.append(weights(trainer))
    assert same(states[1], states[0])
    assert trainer.optimizer.optimizer.report().num_updates == 8
    assert handle is not None
    handle.remove()
    assert "create_optimizer" not in vars(trainer)
    assert isinstance(trainer.optimizer.optimizer, OffloadedOptimizer)


def test_log_and_record_say_what_moved_and_wore(make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_memopt")
    trainer = make(max_steps=2)
    memopt = callbacks.MemoptArguments(offload="off", optimizer_home="file", disk=str(tmp_path), memory_report=True)
    memopt.attach(trainer)
    trainer.train()
    (logged,) = (line for line in caplog.messages if line.startswith("optimizer: "))
    (written,) = OffloadingRecord.read(tmp_path / "out" / OFFLOADING_FILE).weights
    for line in (logged, written):
        assert "2 updates read" in line
        assert f"disk={tmp_path}" in line
        assert "TB per day" in line
    assert written in (tmp_path / "out" / "report" / "report.html").read_text()


def test_an_optimizer_without_state_is_warned_of(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(optim="sgd", max_steps=1)
    callbacks.attach(trainer, optimizer_home="host", **ALONE)
    trainer.train()
    assert "optimizer_home='host' moves nothing: the optimizer keeps no state" in caplog.messages


def attached(make: Any) -> Any:
    trainer = make()
    callbacks.attach(trainer, optimizer_home="host", **ALONE)
    return trainer


REFUSED: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "unknown": (lambda make: make(), {"optimizer_home": "tape"}, "'tape' is unknown; use one of host, file"),
    "attached": (attached, {"optimizer_home": "file"}, r"'file': the trainer's optimizer has one already; remove\(\)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_move_is_refused(kind: str, make: Any) -> None:
    make_trainer, options, complaint = REFUSED[kind]
    trainer = make_trainer(make)
    before = list(trainer.callback_handler.callbacks)
    with pytest.raises(ValueError, match=f"^optimizer_home={complaint}"):
        callbacks.attach(trainer, **options)
    assert trainer.callback_handler.callbacks == before


def test_a_missing_disk_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"^disk='missing' is no folder"):
        callbacks.attach(make(), optimizer_home="file", optimizer_disk="missing")


@pytest.mark.parametrize("engine", ["DeepSpeed", "FSDP"])
def test_engines_that_place_state_are_refused(engine: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make()
    monkeypatch.setattr(trainer, f"is_{engine.lower()}_enabled", True)
    with pytest.raises(ValueError, match=f"^optimizer_home='host': {engine} places the optimizer's state already"):
        callbacks.attach(trainer, optimizer_home="host")


def test_an_optimizer_that_is_prepared_already_is_refused(make: Any) -> None:
    trainer = make(max_steps=1)
    trainer.train()
    callbacks.attach(trainer, optimizer_home="host", **ALONE)
    with pytest.raises(ValueError, match=r"^optimizer_home='host': optimizer is accelerate's already"):
        trainer.train()


def test_an_optimizer_that_needs_closures_is_refused_when_training_begins(make: Any) -> None:
    trainer = make()
    trainer.optimizer = torch.optim.LBFGS(decoder().parameters())
    callbacks.attach(trainer, optimizer_home="host", **ALONE)
    with pytest.raises(ValueError, match=r"^optimizer_home='host': optimizer=LBFGS needs a closure"):
        trainer.train()
