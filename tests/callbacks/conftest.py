import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule
from offload_trainers import STEPS, decoder, examples
from torch import nn

from hf_memopt.exactness.recording import Recording

recorded_script = LateModule("hf_memopt.callbacks.recorded_script")
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


def _kinds_of_arguments() -> list[Any]:
    base = transformers.TrainingArguments
    kinds = (base, *base.__subclasses__(), *(each for kind in base.__subclasses__() for each in kind.__subclasses__()))
    return [kind for kind in kinds if "__init__" in vars(kind)]


@contextmanager
def _arguments_put_back() -> Iterator[None]:
    before = {kind: kind.__init__ for kind in _kinds_of_arguments()}
    try:
        yield
    finally:
        transformers.TrainingArguments.__new__ = lambda cls, *args, **kwargs: object.__new__(cls)
        for kind in _kinds_of_arguments():  # some may have been imported meanwhile
            kind.__init__ = before.get(kind) or inspect.unwrap(kind.__init__)


@pytest.fixture
def arguments_put_back() -> Callable[[], AbstractContextManager[None]]:
    """A context after which TrainingArguments are made as before.

    Only a `__new__` that changes nothing stays: Python cannot forget one.
    """
    return _arguments_put_back


@pytest.fixture
def record_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments_put_back: Any
) -> Callable[..., Recording]:
    """A function that records a script, or `-m` and a module, with switches on."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("hf_memopt.callbacks.recorded_script.show_messages", lambda: None)

    def record(
        *words: str,
        texts: tuple[str, ...] = (),
        is_switched: bool = True,
        steps: int = 2,
        in_float32: bool = False,
    ) -> Recording:
        order = recorded_script.Order(str(tmp_path), steps, None, in_float32, 0, list(texts), is_switched)
        monkeypatch.setenv(recorded_script.ORDER_VARIABLE, json.dumps(vars(order)))
        with arguments_put_back():
            recorded_script.main(words)
        return Recording.read(tmp_path / "rank-0.json")

    return record
