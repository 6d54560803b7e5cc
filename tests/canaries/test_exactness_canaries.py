"""Canaries of the seams by which `verify` sees any program's training steps, and sets its arguments."""

import importlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
import torch
from late_imports import LateModule
from reliance import relied_on_by
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

accelerate = LateModule("accelerate")
callbacks = LateModule("hf_memopt.callbacks")
torchao_optim = LateModule("torchao.optim")
transformers = LateModule("transformers")
trl = LateModule("trl")

RECORDER = "hf_memopt/exactness/recorder.py"
FINGERPRINT = "hf_memopt/exactness/recording.py"
SWITCHES = "callbacks/recorded_script.py"
SCRIPT = "callbacks/recorded_script.py"


def test_a_tensors_backward_calls_that_of_torch_autograd_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with relied_on_by(RECORDER):
        calls: list[Any] = []
        monkeypatch.setattr(torch.autograd, "backward", lambda *args, **kwargs: calls.append(args))
        loss = torch.ones((), requires_grad=True) * 2
        loss.backward()
        assert calls[0][0] is loss


def test_an_accelerator_calls_a_tensors_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    with relied_on_by(SCRIPT):
        calls: list[Any] = []
        monkeypatch.setattr(torch.autograd, "backward", lambda *args, **kwargs: calls.append(args))
        accelerate.Accelerator(cpu=True).backward(torch.ones((), requires_grad=True) * 2)
        assert len(calls) == 1


def test_a_module_is_called_by_the_call_of_its_base_class(monkeypatch: pytest.MonkeyPatch) -> None:
    with relied_on_by(RECORDER):
        called: list[nn.Module] = []
        call = nn.Module.__call__

        def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            called.append(module)
            return call(module, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "__call__", noting)
        model = nn.Sequential(nn.Linear(2, 2))
        model(torch.ones(1, 2))
        traced = torch.fx.symbolic_trace(nn.Linear(2, 2))
        traced(torch.ones(1, 2))
        assert called[:2] == [model, model[0]]
        assert traced in called
        # A hook of all modules would make compiled ones compile again; a class's attribute does not.
        assert not nn.modules.module._has_any_global_hook()


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Run compiled functions, such as those of torchao's optimizers, as they are written."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adafactor", "LBFGS", "torchao's AdamW8bit", "accelerate's"])
def test_global_hooks_see_each_update(optimizer: str, uncompiled: None) -> None:
    with relied_on_by(RECORDER):
        weight = nn.Parameter(torch.ones(64, 64))
        made: Any
        if optimizer.startswith("torchao"):
            made = torchao_optim.AdamW8bit([weight])
        elif optimizer.startswith("accelerate"):
            made = accelerate.Accelerator(cpu=True).prepare(torch.optim.AdamW([weight]))
        else:
            made = getattr(torch.optim, optimizer)([weight])
        seen: list[str] = []
        handles = [
            register_optimizer_step_pre_hook(lambda *args: seen.append("before")),
            register_optimizer_step_post_hook(lambda *args: seen.append("after")),
        ]

        def closure() -> Tensor:
            made.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss

        try:
            closure()
            made.step(closure) if optimizer == "LBFGS" else made.step()
            assert seen == ["before", "after"]
        finally:
            for handle in handles:
                handle.remove()
        made.step(closure) if optimizer == "LBFGS" else made.step()
        assert len(seen) == 2


def test_torch_says_which_operation_is_not_deterministic() -> None:
    with relied_on_by(RECORDER):
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with warnings.catch_warnings(record=True) as shown:
                warnings.simplefilter("always")
                torch.ones(2).put_(torch.tensor([0]), torch.tensor([1.0]))
        finally:
            torch.use_deterministic_algorithms(False)
        (warning,) = shown
        assert str(warning.message).startswith("put_ does not have a deterministic implementation")


def test_functions_of_torch_func_have_a_level() -> None:
    with relied_on_by(RECORDER):
        levels: list[Any] = []
        torch.func.vmap(lambda x: (levels.append(torch._C._functorch.maybe_current_level()), x)[1])(torch.ones(2))
        assert levels[0] is not None
        assert torch._C._functorch.maybe_current_level() is None


def test_a_graph_shows_its_leaves() -> None:
    with relied_on_by(RECORDER):
        leaf = torch.ones((), requires_grad=True)
        (node, _), *_ = (leaf * 2).grad_fn.next_functions  # type: ignore[union-attr]
        assert node.variable is leaf


def test_wrappers_show_their_parts(one_rank: None) -> None:
    with relied_on_by(FINGERPRINT):
        from torch.distributed.tensor import distribute_tensor

        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        names, _ = distribute_tensor(torch.ones(2), mesh).__tensor_flatten__()
        assert names == ["_local_tensor"]


def test_new_comes_before_the_init_that_dataclass_has_made() -> None:
    """Try it with a class of this test, since Python cannot forget a `__new__`."""
    with relied_on_by(SWITCHES):

        @dataclass
        class Base:
            x: int = 0

        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            made: Any = cls.__init__
            cls.__init__ = lambda self, **given: made(self, **{**given, "x": 7})  # type: ignore[misc]
            return object.__new__(cls)

        Base.__new__ = new  # type: ignore[method-assign,assignment]

        @dataclass
        class Derived(Base):
            y: int = 1

        assert Derived(x=3, y=2) == Derived(y=2)
        assert Derived(x=3).x == 7
        assert (Base(x=3).x, "__new__" in vars(Derived)) == (7, False)


def configs() -> list[Any]:
    """Return all TrainingArguments of transformers and TRL."""
    base = transformers.TrainingArguments
    names = importlib.import_module("trl").__all__
    named = [getattr(trl, name) for name in names if name.endswith("Config")]
    return [base, transformers.Seq2SeqTrainingArguments, *(each for each in named if issubclass(each, base))]


def test_arguments_have_no_new_of_their_own_and_no_field_of_ours() -> None:
    with relied_on_by(SWITCHES):
        ours = {each.name for each in fields(callbacks.MemoptArguments)}
        found = configs()
        assert trl.SFTConfig in found
        assert len(found) > 5
        for each in found:
            assert is_dataclass(each)
            assert "__new__" not in vars(each) or each is transformers.TrainingArguments
            assert not ours & {field.name for field in fields(each)}, each.__name__


def test_trainers_run_models_by_an_accelerator_that_prepares_them() -> None:
    with relied_on_by(SCRIPT):
        assert isinstance(vars(accelerate.Accelerator)["prepare"], type(lambda: None))
        names = {field.name for field in fields(transformers.TrainingArguments)}
        assert names >= {"eval_strategy", "save_strategy", "report_to", "load_best_model_at_end", "push_to_hub"}
        assert "output_dir" in names


def test_a_parser_of_arguments_reads_one_field_alone() -> None:
    with relied_on_by(SWITCHES):
        parser = transformers.HfArgumentParser(trl.SFTConfig, allow_abbrev=False)
        found, _ = parser.parse_known_args(["--max_length=7"])
        assert found.max_length == 7
