from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule
from offload_trainers import STEPS, decoder, examples
from torch import nn

transformers = LateModule("transformers")


@pytest.fixture(scope="module", autouse=True)
def quick_collections(small_heap: None) -> None:
    """Shorten Trainer's frequent garbage collections, which take a second each once all libraries are imported."""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    """A constructor of trainers of a tiny decoder: 6 steps of 2 micro-batches, evaluated after every second step."""

    def make(model: nn.Module | None = None, **options: Any) -> Any:
        of_trainer = {
            name: options.pop(name) for name in ("callbacks", "compute_loss_func", "model_init") if name in options
        }
        arguments = transformers.TrainingArguments(**{**STEPS, "output_dir": str(tmp_path / "out"), **options})
        if "model_init" not in of_trainer:
            of_trainer["model"] = decoder() if model is None else model
        return transformers.Trainer(args=arguments, train_dataset=examples(), eval_dataset=examples()[:4], **of_trainer)

    return make
