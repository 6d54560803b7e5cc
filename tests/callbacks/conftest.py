from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from offload_trainers import decoder, examples
from torch import nn
from transformers import Trainer, TrainingArguments


@pytest.fixture(scope="module", autouse=True)
def quick_collections(small_heap: None) -> None:
    """Trainer collects garbage often, which takes a second each time where everything has been imported."""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Trainer]:
    """A trainer of the tiny decoder: 6 steps of 2 micro-batches, an evaluation after every second."""

    def make(model: nn.Module | None = None, **options: Any) -> Trainer:
        of_trainer = {
            name: options.pop(name) for name in ("callbacks", "compute_loss_func", "model_init") if name in options
        }
        settings = {
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "no",
            "logging_steps": 2,
        }
        quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "output_dir": str(tmp_path / "out")}
        arguments = TrainingArguments(**{**settings, **quiet, **options})
        if "model_init" not in of_trainer:
            of_trainer["model"] = decoder() if model is None else model
        return Trainer(args=arguments, train_dataset=examples(), eval_dataset=examples()[:4], **of_trainer)

    return make
