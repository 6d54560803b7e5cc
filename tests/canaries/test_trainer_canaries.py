"""Canaries of offloading in a Trainer in transformers, TRL and accelerate."""

import importlib
import inspect
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from late_imports import LateModule
from reliance import relied_on_by
from torch import nn

trainer_toys = LateModule("trainer_toys")
transformers = LateModule("transformers")
trainer_callback = LateModule("transformers.trainer_callback")


ATTACH = "callbacks/attach.py"
CALLBACK = "callbacks/offloading.py"
EVERY_TRAINER = "callbacks/every_trainer.py"


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


def test_every_trainer_ends_in_the_init_of_transformers_trainer_and_has_an_accelerator(tmp_path: Path) -> None:
    import trl

    with relied_on_by(EVERY_TRAINER):
        kinds = [getattr(trl, name) for name in dir(trl) if name.endswith("Trainer")]
        assert {trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer} <= set(kinds)
        assert all(issubclass(kind, transformers.Trainer) for kind in kinds)
        assert all("super().__init__(" in inspect.getsource(kind.__init__) for kind in kinds)
        assert isinstance(trainer(tmp_path, []).accelerator, Accelerator)


def test_prepare_returns_its_models_in_a_tuple_or_alone() -> None:
    with relied_on_by(EVERY_TRAINER):
        accelerator, model = Accelerator(cpu=True), Regression()
        alone = accelerator.prepare(model)
        assert isinstance(alone, nn.Module)
        prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        assert isinstance(prepared, tuple)
        assert isinstance(prepared[0], nn.Module)


def test_accelerates_launcher_is_a_module_that_runs_modules() -> None:
    from accelerate.commands import launch

    with relied_on_by("hf_memopt/cli/launch_command.py"):
        assert '__name__ == "__main__"' in inspect.getsource(launch)
        words = ["--cpu", "-m", "package.module", "train.py", "--lr", "1"]
        parsed = launch.launch_command_parser().parse_args(words)
        assert (parsed.module, parsed.training_script) == (True, "package.module")
        assert parsed.training_script_args == ["train.py", "--lr", "1"]


def test_hf_argument_parser_leaves_words_that_are_none_of_its_flags() -> None:
    with relied_on_by("callbacks/arguments.py"):
        parser = transformers.HfArgumentParser(transformers.TrainingArguments, allow_abbrev=False, add_help=False)
        words = ["--num_processes", "2", "--learning_rat", "1", "--seed=3"]
        found, others = parser.parse_args_into_dataclasses(
            words, return_remaining_strings=True, look_for_args_file=False
        )
        assert found.seed == 3
        assert others == words[:4]


def test_grpo_and_rloo_have_no_activation_offloading_of_their_own() -> None:
    """Watch a statement of the documentation."""
    import trl

    with relied_on_by("docs/trainer.md"):
        for name in ("GRPO", "RLOO", "SFT", "DPO", "KTO", "Reward"):
            fields = getattr(trl, f"{name}Config").__dataclass_fields__
            assert ("activation_offloading" in fields) == (name not in ("GRPO", "RLOO"))


@pytest.mark.parametrize(
    ("trainer", "call"),
    [
        ("DPOTrainer", "self.ref_model("),
        ("KTOTrainer", "self.ref_model("),
        ("GRPOTrainer", "self.ref_model,"),
        ("RLOOTrainer", "self.ref_model,"),
        ("GRPOTrainer", "reward_func(**reward_inputs)"),
        ("RLOOTrainer", "reward_func(**reward_inputs)"),
        ("experimental.gkd.GKDTrainer", "self.teacher_model("),
        ("experimental.gold.GOLDTrainer", "self.teacher_model("),
        ("DistillationTrainer", "teacher_lm_head = unwrapped_teacher.get_output_embeddings()"),
    ],
)
def test_trls_trainers_call_their_frozen_models(trainer: str, call: str) -> None:
    module, _, name = f"trl.{trainer}".rpartition(".")
    with relied_on_by(ATTACH):
        assert call in inspect.getsource(getattr(importlib.import_module(module), name))
