"""Canaries of `estimate_trainer` in transformers and accelerate."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from late_imports import LateModule
from reliance import relied_on_by
from torch import nn

trainer_toys = LateModule("trainer_toys")
transformers = LateModule("transformers")

SIMULATED = "hf_memopt/planning/workloads/simulated_trainer.py"
BATCHES = "hf_memopt/planning/workloads/trainer_batches.py"


def trainer(folder: Path, **options: Any) -> Any:
    rows = [{"x": torch.ones(8) * number, "labels": torch.ones(2)} for number in range(8)]
    arguments = transformers.TrainingArguments(str(folder), **(trainer_toys.SETTINGS | options))
    return transformers.Trainer(trainer_toys.Regression(), arguments, train_dataset=rows)


def test_a_list_of_batches_is_a_dataloader_and_an_epoch_of_it_an_update(tmp_path: Path) -> None:
    with relied_on_by(SIMULATED):
        watched = trainer(tmp_path, max_steps=3)
        batches = [{"x": torch.ones(2, 8), "labels": torch.ones(2, 2)}] * 2
        watched.get_train_dataloader = lambda: batches
        steps: list[int] = []

        class Begins(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                steps.append(state.global_step)

        watched.callback_handler.callbacks = [Begins()]
        watched.train()
        assert steps == [0, 1, 2]
        assert watched.state.global_step == 3


def test_the_arguments_keep_the_device_and_the_precision_where_they_are_set(tmp_path: Path) -> None:
    with relied_on_by(SIMULATED):
        watched = trainer(tmp_path, bf16=True)
        assert watched.args.mixed_precision == "bf16"
        watched.args.__dict__["_setup_devices"] = torch.device("meta")
        assert watched.args.device == torch.device("meta")
        watched.args.mixed_precision = "no"
        before = watched.accelerator
        AcceleratorState._reset_state(reset_partial_state=True)
        watched.create_accelerator_and_postprocess()
        assert watched.accelerator is not before
        assert watched.accelerator.mixed_precision == "no"


def test_a_model_that_accelerate_has_prepared_tells_what_it_was() -> None:
    with relied_on_by("hf_memopt/planning/simulation/patched_accelerate.py"):
        model = nn.Linear(2, 2)
        plain = model.forward
        Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model, evaluation_mode=True)
        assert vars(model)["_is_accelerate_prepared"] is True
        assert vars(model)["_original_forward"] == plain
        assert model.forward != plain


def test_the_dataloader_tells_the_device_to_which_it_moves_batches(tmp_path: Path) -> None:
    with relied_on_by(BATCHES):
        loader = trainer(tmp_path).get_train_dataloader()
        assert loader.device == torch.device("cpu")
        loader.device = None
        assert next(iter(loader))["x"].shape == (2, 8)
