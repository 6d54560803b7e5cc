"""What offloading in a Trainer relies on in transformers, TRL and accelerate. A failure names who relies on it."""

import inspect
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from late_imports import LateModule
from reliance import relied_on_by
from torch import nn

trainer_toys = LateModule("trainer_toys")
transformers = LateModule("transformers")
trainer_callback = LateModule("transformers.trainer_callback")


ATTACH = "callbacks/attach.py"
CALLBACK = "callbacks/offloading.py"

pytestmark = pytest.mark.canary


class Regression(nn.Module):
    def __init__(self, events: list[str] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.events = events if events is not None else []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.events.append("forward" if torch.is_grad_enabled() else "forward without grad")
        return {"loss": (self.layer(x) - labels).square().mean()}


def trainer(folder: Path, events: list[str], **options: Any) -> Any:
    rows = [{"x": torch.ones(4) * i, "labels": torch.ones(1)} for i in range(8)]
    settings = {"max_steps": 1, "per_device_train_batch_size": 4, "save_strategy": "no", "output_dir": str(folder)}
    arguments = transformers.TrainingArguments(use_cpu=True, report_to=[], disable_tqdm=True, **{**settings, **options})
    return transformers.Trainer(
        Regression(events), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[trainer_toys.Events(events)]
    )


def test_forward_and_loss_run_in_the_context_of_the_instance_and_backward_does_not(tmp_path: Path) -> None:
    events: list[str] = []
    with relied_on_by(ATTACH):
        watched = trainer(tmp_path, events)
        plain = watched.compute_loss_context_manager

        @contextmanager
        def context() -> Any:
            events.append("enter")
            with plain():
                yield
            events.append("exit")

        watched.compute_loss_context_manager = context
        watched.model.layer.bias.register_hook(lambda gradient: events.append("backward"))
        watched.train()
        assert events == ["begin", "enter", "forward", "exit", "backward", "end"]
        events.clear()
        watched.evaluate()
        assert events == ["enter", "forward without grad", "exit"]


def test_training_that_starts_over_begins_twice_and_ends_once(tmp_path: Path) -> None:
    events: list[str] = []
    with relied_on_by(CALLBACK):
        watched = trainer(tmp_path, events, auto_find_batch_size=True)
        failures = iter([RuntimeError("CUDA out of memory. Tried to allocate")])

        def fail_once(*event: Any) -> None:
            for failure in failures:
                raise failure

        watched.model.register_forward_hook(fail_once)
        watched.train()
        assert [event for event in events if event != "forward"] == ["begin", "begin", "end"]


def test_callbacks_are_given_the_model_that_trains(tmp_path: Path) -> None:
    with relied_on_by(CALLBACK):
        watched = trainer(tmp_path, [])
        watched.model_init = Regression
        watched.train()
        (callback,) = (c for c in watched.callback_handler.callbacks if isinstance(c, trainer_toys.Events))
        assert callback.models == [watched.model]


def test_callbacks_without_exportable_state_are_not_saved(tmp_path: Path) -> None:
    with relied_on_by(CALLBACK):
        assert not issubclass(transformers.TrainerCallback, trainer_callback.ExportableState)
        watched = trainer(tmp_path, [], save_strategy="steps", save_steps=1)
        watched.train()
        assert "Events" not in watched.state.stateful_callbacks


def test_the_options_that_are_refused_have_their_names() -> None:
    from trl import SFTConfig

    with relied_on_by(CALLBACK):
        assert SFTConfig.__dataclass_fields__["activation_offloading"].default is False
        plugin = inspect.signature(FullyShardedDataParallelPlugin).parameters
        assert {"activation_checkpointing", "activation_checkpointing_offload"} <= plugin.keys()
        assert "gradient_checkpointing_kwargs" in transformers.TrainingArguments.__dataclass_fields__
        assert isinstance(transformers.TrainingArguments.n_gpu, property)
