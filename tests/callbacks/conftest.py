from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule
from offload_trainers import STEPS, decoder, examples
from torch import nn

transformers = LateModule("transformers")
trl = LateModule("trl")


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


@contextmanager
def _arguments_put_back() -> Iterator[None]:
    base = transformers.TrainingArguments
    before = {cls: cls.__init__ for cls in (base, trl.SFTConfig)}
    try:
        yield
    finally:
        base.__new__ = lambda cls, *args, **kwargs: object.__new__(cls)
        for cls, make in before.items():
            cls.__init__ = make


@pytest.fixture
def arguments_put_back() -> Callable[[], AbstractContextManager[None]]:
    """A context after which TrainingArguments are made as before.

    Only a `__new__` that changes nothing stays: Python cannot forget one.
    """
    return _arguments_put_back
