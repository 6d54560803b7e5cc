"""The seams at which `fit` stands in the way of accelerate, transformers and torch."""

import inspect
from typing import Any

import pytest
import torch
from late_imports import LateModule
from reliance import relied_on_by
from torch import nn

accelerate = LateModule("accelerate")
transformers = LateModule("transformers")

FIT = "callbacks/fit.py"
LOOP = "callbacks/offloading.py"


def test_prepare_calls_the_methods_of_the_object() -> None:
    called: list[str] = []
    accelerator = accelerate.Accelerator(cpu=True)
    for name in ("prepare_model", "prepare_optimizer"):
        plain = getattr(accelerator, name)
        setattr(
            accelerator, name, lambda *args, name=name, plain=plain, **kw: called.append(name) or plain(*args, **kw)
        )
    model = nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with relied_on_by(FIT):
        assert called == ["prepare_model", "prepare_optimizer"]


def test_a_trainer_moves_its_model_by_one_method() -> None:
    with relied_on_by(FIT):
        assert "self._move_model_to_device(model, args.device)" in inspect.getsource(transformers.Trainer.__init__)


def test_tensors_call_backward_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(torch.autograd, "backward", lambda *args, **kwargs: called.append(args))
    torch.ones(1, requires_grad=True).sum().backward()
    with relied_on_by(FIT):
        assert len(called) == 1


def test_the_innermost_hooks_on_saved_tensors_can_be_asked_for() -> None:
    def hook(saved: Any) -> Any:
        return saved

    with relied_on_by(LOOP):
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        with torch.autograd.graph.saved_tensors_hooks(hook, hook):
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) == (hook, hook)
