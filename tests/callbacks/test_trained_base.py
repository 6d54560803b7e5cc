"""Tests of trainers whose weights train with a home: logs, weights and checkpoints are those of the plain run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from optimizer_toys import equal

from hf_memopt import StreamedWeights
from hf_memopt.weights import OffloadedOptimizer

transformers = LateModule("transformers")
callbacks = LateModule("hf_memopt.callbacks")

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "tie_word_embeddings": False,
}


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict[str, Any]:
        tokens = torch.randint(300, (12,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def make(folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    saving = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    others = {"load_best_model_at_end": True, "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "use_cpu": True}
    args = transformers.TrainingArguments(str(folder), **{**saving, **others, **batches, **options})
    return transformers.Trainer(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)),
        args,
        train_dataset=Rows(),
        eval_dataset=Rows(),
    )


def log_of(trainer: Any) -> list[Any]:
    return [
        {name: value for name, value in each.items() if "loss" in name or "norm" in name}
        for each in trainer.state.log_history
    ]


def run(folder: Path, switches: dict[str, Any] | None, **options: Any) -> list[Any]:
    """Train, resume from a checkpoint in the middle, and return logs, weights and the optimizers' state."""
    found: list[Any] = []
    for resumed in (False, True):
        trainer = make(folder, **options)
        if switches is not None:
            callbacks.attach(trainer, **switches, trained=True, memory=False)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resumed else None)
        found += [log_of(trainer), trainer.model.state_dict(), trainer.optimizer.state_dict()]
    return found


TRAININGS: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.5},
    "updated in backward": {"max_grad_norm": 0.0},
    "updated in each backward": {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1},
    "bf16": {"bf16": True},
    "checkpointed": {"gradient_checkpointing": True, "optim": "sgd"},
    "adafactor": {"optim": "adafactor"},
}


@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.sweep(share=0.25)
def test_a_trainer_logs_saves_and_resumes_as_without_it(kind: str, home: str, tmp_path: Path) -> None:
    want = run(tmp_path / "plain", None, **TRAININGS[kind])
    switches = {"base": home, "optimizer_home": "host"} if kind == "bf16" else {"base": home}
    assert equal(run(tmp_path / "ours", switches, **TRAININGS[kind]), want)


def halving() -> Any:
    class Halving(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *others: Any, **kwargs: Any) -> None:
            for each in kwargs["model"].parameters():
                each.grad.mul_(0.5)

    return Halving()


@pytest.mark.parametrize("make_callback", [None, halving])
def test_updates_run_in_backward_where_nothing_sees_gradients(make_callback: Any, tmp_path: Path) -> None:
    found = []
    for switches in (None, {"base": "host"}):
        trainer = make(tmp_path, max_grad_norm=0.0)
        if make_callback is not None:
            trainer.add_callback(make_callback())
        if switches is not None:
            callbacks.attach(trainer, **switches, trained=True)
        trainer.train()
        found.append([log_of(trainer), trainer.model.state_dict()])
    assert equal(found[1], found[0])
    weights = trainer.model._hf_memopt_streamed_weights
    assert weights.trained
    assert bool(weights._adopted[0].weights.at_once) is (make_callback is None)


def test_removing_leaves_a_plain_trainer(tmp_path: Path) -> None:
    trainer, want = make(tmp_path), make(tmp_path)
    handle = callbacks.attach(trainer, base="file", trained=True, memory=False)
    handle.remove()
    for each in (trainer, want):
        each.train()
    assert type(trainer.optimizer.optimizer) is type(want.optimizer.optimizer)
    assert equal(trainer.model.state_dict(), want.model.state_dict())


def test_arguments_stream_before_the_trainer_and_attach_adopts(tmp_path: Path) -> None:
    arguments = callbacks.MemoptArguments(base="file", trained=True, disk=str(tmp_path), memory_log=False)
    assert callbacks.MemoptArguments.from_text(arguments.to_text()) == arguments
    trainer = make(tmp_path)
    weights = arguments.stream_base(trainer.model, trainer.args)
    assert isinstance(weights, StreamedWeights)
    arguments.attach(trainer)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, OffloadedOptimizer)
    assert equal(trainer.model.state_dict(), run(tmp_path / "plain", None)[1])


@pytest.mark.parametrize(
    ("switches", "complaint"),
    [
        ({"trained": True}, "trained=True needs base"),
        ({"base": "host"}, r"no frozen weights.*add trained=True"),
    ],
)
def test_switches_without_effect_are_refused(switches: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=complaint):
        callbacks.attach(make(tmp_path), **switches)
    with pytest.raises(ValueError, match=r"trained=True needs base=auto, host or file"):
        callbacks.MemoptArguments(trained=True)


def test_frozen_weights_that_stream_already_do_not_train(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.model.model.requires_grad_(False)
    StreamedWeights(trainer.model, home="host")
    with pytest.raises(ValueError, match=r"trained=True: the model's frozen weights stream already"):
        callbacks.attach(trainer, base="host", trained=True)
