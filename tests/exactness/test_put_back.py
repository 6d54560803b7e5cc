"""`verify` leaves models, optimizers, generators and torch as it found them, after errors too."""

import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from exact_steps import WIDTH, Training, batches, tiny_net
from frozen_bases import adapted, ids, streamed
from late_imports import LateModule
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from hf_memopt.exactness import recording as fingerprint
from hf_memopt.exactness import verify
from hf_memopt.exactness.recorder import Recorder

torchao_optim = LateModule("torchao.optim")
diffusers_config = LateModule("diffusers.configuration_utils")


def seams() -> list[Any]:
    """Return all that a recorder changes in torch."""
    hooks = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    kernels = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    showing = warnings.showwarning, list(warnings.filters)
    return [nn.Module.__call__, torch.autograd.backward, *map(dict, hooks), *kernels, *showing]


def state(training: Training) -> list[Any]:
    """Return copies of everything that a step changes."""
    model, optimizer = training.model, training.optimizer
    tensors = [*model.parameters(), *model.buffers()]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return [
        *(tensor.detach().clone() for tensor in tensors),
        *(None if tensor.grad is None else tensor.grad.clone() for tensor in tensors),
        *(value.clone() for parameter in model.parameters() for value in optimizer.state.get(parameter, {}).values()),
        torch.get_rng_state(),
        repr(groups),
        repr(random.getstate()),
        repr(np.random.get_state()),
    ]


def same(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, Tensor) else bool(first == second)


@contextmanager
def unchanged(training: Training) -> Iterator[None]:
    before, of_torch = state(training), seams()
    yield
    after = state(training)
    assert len(after) == len(before)
    assert all(map(same, before, after))
    assert seams() == of_torch


def draws(training: Training, fails_in: int | None = None) -> Callable[[], None]:
    """Return a step that draws from every generator, and fails in its n-th call."""
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        torch.rand(3), random.random(), np.random.rand()
        training()
        if calls == fails_in:
            raise RuntimeError("failed")

    return step


@pytest.fixture(params=["fresh", "warm"])
def training(request: pytest.FixtureRequest) -> Training:
    """A model with statistics, and an optimizer that has made no update, or one."""
    training = Training(nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, WIDTH)))
    if request.param == "warm":
        training()
        training()
        training.model(batches()[0]).sum().backward()
    return training


def test_everything_is_put_back(training: Training) -> None:
    other = Training(training.model, learning_rate=0.1)
    with unchanged(training), unchanged(other):
        assert verify(draws(training), draws(other)).verdict == "different"


@pytest.mark.parametrize("fails_in", [1, 2, 4])
def test_everything_is_put_back_after_an_error_in_plain(training: Training, fails_in: int) -> None:
    with unchanged(training), pytest.raises(RuntimeError, match="failed"):
        verify(draws(training, fails_in), draws(training))


def test_everything_is_put_back_after_an_error_in_switched(training: Training) -> None:
    with unchanged(training), pytest.raises(RuntimeError, match="failed"):
        verify(draws(training), draws(training, fails_in=2))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_inside_of_a_pass_leaves_no_depth_behind(where: str) -> None:
    model, x = nn.Linear(WIDTH, WIDTH), batches()[0]

    def fail(*given: Any) -> None:
        raise RuntimeError("failed")

    with Recorder() as recorder:
        handle = model.register_forward_hook(fail) if where == "forward" else model.weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="failed"):
            model(x).sum().backward()
        handle.remove()
        model(x).sum().backward()
    phases = [place.phase for place in recorder.recording.tensors]
    assert phases.count("input") == 2
    assert phases.count("gradient") == 2


def test_states_of_an_optimizer_keep_their_dtype() -> None:
    class Precise(torch.optim.Optimizer):
        """Holds states in float32 for weights in bfloat16."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                total = self.state[parameter].setdefault("total", torch.zeros_like(parameter, dtype=torch.float32))
                total.add_(parameter.grad)
                parameter.data.sub_(total.to(parameter.dtype), alpha=0.1)

    model = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
    optimizer = Precise(model.parameters())

    def step() -> None:
        model(batches()[0].bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = {name: each["total"].clone() for name, each in optimizer.state.items()}
    assert verify(step, step).equal
    assert all(torch.equal(optimizer.state[parameter]["total"], total) for parameter, total in before.items())
    assert all(each["total"].dtype == torch.float32 for each in optimizer.state.values())


def test_weights_whose_data_a_step_replaces() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    before = model.weight.detach().clone()

    def step() -> None:
        model(batches()[0]).square().mean().backward()
        model.weight.data = model.weight.detach() - model.weight.grad
        model.zero_grad()

    report = verify(step, step)
    assert report.equal, report
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("checkpointing", ["none", "block", "reentrant"])
def test_streamed_weights(checkpointing: str) -> None:
    plain, switched = adapted(checkpointing), adapted(checkpointing)
    base = streamed(switched)
    optimizers = {model: torch.optim.AdamW(model.parameters(), lr=0.1) for model in (plain, switched)}

    def step(model: nn.Module, context: AbstractContextManager[Any]) -> None:
        with context:
            loss = model(ids()).square().mean()
        loss.backward()
        optimizers[model].step()
        optimizers[model].zero_grad()

    for _ in range(2):
        report = verify(lambda: step(plain, nullcontext()), lambda: step(switched, base.stream()))
        assert report.equal, report
        assert report.num_gradients >= 10


def test_states_of_torchaos_optimizers_are_put_back() -> None:
    model = nn.Linear(64, 64)
    optimizer = torchao_optim.AdamW8bit(model.parameters(), lr=0.1)
    x = torch.ones(2, 64)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.compiler.set_stance("force_eager"):
        step()
        state = optimizer.state[model.weight]
        kinds = {name: type(each) for name, each in state.items()}
        moment = state["exp_avg"].dequantize().clone()
        report = verify(step, step)
    assert report.equal, report
    assert "optimizer" in report.compared
    state = optimizer.state[model.weight]
    assert {name: type(each) for name, each in state.items()} == kinds
    assert torch.equal(state["exp_avg"].dequantize(), moment)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_a_model_that_first_runs_without_a_graph(context: Callable[[], AbstractContextManager[Any]]) -> None:
    training = Training(tiny_net(dropout=0.0))
    training.model(batches()[0]).sum().backward()

    def step(factor: float) -> None:
        with context():
            training.model(batches()[0])
        loss = training.model(batches()[1]).square().mean() * factor
        loss.backward()
        training.optimizer.step()

    with unchanged(training):
        assert verify(lambda: step(1), lambda: step(2)).verdict == "different"
    training.model(batches()[1]).sum().backward()
    assert not training.model[0].weight.is_inference()


def test_a_default_device_of_the_program_changes_nothing() -> None:
    training = Training(tiny_net(dropout=0.0))
    data = batches()

    def step(factor: float) -> None:
        with torch.device("meta"):
            loss = training.model(data[0]).square().mean() * factor
            loss.backward()
            training.optimizer.zero_grad()

    fingerprint._signs.cache_clear()
    assert verify(lambda: step(1), lambda: step(1)).equal
    assert verify(lambda: step(1), lambda: step(2)).verdict == "different"


def test_nothing_stays_in_memory() -> None:
    training = Training(tiny_net())
    report = verify(training, training)
    seen = [weakref.ref(each) for each in (training, training.model, *training.model.parameters())]
    del training
    gc.collect()
    assert [each() for each in seen] == [None] * len(seen)
    assert report.equal


def test_warnings_are_shown_as_before() -> None:
    model = tiny_net()

    def step() -> None:
        warnings.warn("of the program", stacklevel=1)
        model(batches()[0]).sum().backward()
        model.zero_grad()

    with pytest.warns(UserWarning, match="of the program"):
        assert verify(step, step).equal


def test_deterministic_kernels_that_a_program_has_switched_on_stay_so() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with nullcontext():
            assert verify(Training(), Training()).equal
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.tensor(3.14159265))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.table(tokens) * self.scale))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def exchange_buffer(model: Any) -> None:
    model.scale = model.scale.bfloat16().float()


def untie(model: Any) -> None:
    model.head.weight = nn.Parameter(model.table.weight.detach().clone())


def freeze(model: Any) -> None:
    model.eval()
    model.table.weight.requires_grad_(False)


def freeze_and_fail(model: Any) -> None:
    freeze(model)
    raise RuntimeError("failed")


@pytest.mark.parametrize("change", [exchange_buffer, untie, freeze, freeze_and_fail])
def test_what_a_switched_function_exchanges_is_put_back(change: Callable[[Any], None]) -> None:
    model, tokens = Tied(), torch.arange(50).reshape(2, 25)
    before = model.table.weight, model.scale, model.scale.clone()

    def step(before_step: Callable[[Any], None] = lambda model: None) -> None:
        before_step(model)
        model(tokens).backward()
        model.zero_grad()

    for _ in range(2):
        if change is freeze_and_fail:
            with pytest.raises(RuntimeError, match="failed"):
                verify(step, lambda: step(change))
        else:
            assert verify(step, lambda: step(change)).verdict == "different"
        assert model.table.weight is model.head.weight is before[0]
        assert model.scale is before[1]
        assert torch.equal(model.scale, before[2])
        assert model.training
        assert model.table.training
        assert model.table.weight.requires_grad


def test_groups_and_options_that_a_switched_function_changes_are_put_back() -> None:
    training = Training(tiny_net(dropout=0.0))
    more = nn.Parameter(torch.ones(3))

    def switched() -> None:
        optimizer = training.optimizer
        optimizer.param_groups[0]["betas"] = (0.5, 0.5)
        optimizer.param_groups[0]["params"] = list(reversed(optimizer.param_groups[0]["params"]))
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [more]})
        training()

    with unchanged(training):
        before = list(map(id, training.optimizer.param_groups[0]["params"]))
        report = verify(training, switched)
        assert [list(map(id, group["params"])) for group in training.optimizer.param_groups] == [before]
    assert str(report.first and report.first.place) == "betas[0] of 0.weight in step 1"
    assert report.advice.startswith("betas[0] is 0.5 instead of 0.9")


@pytest.mark.parametrize("reused", [True, False])
def test_regions_of_autocast_are_left_as_they_were(reused: bool) -> None:
    model, x, region = tiny_net(dropout=0.0), batches()[0], torch.autocast("cpu", torch.bfloat16)

    def step(weight: int) -> None:
        with region if reused else torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean() * weight
        loss.backward()
        model.zero_grad()

    for _ in range(2):
        report = verify(lambda: step(1), lambda: step(2))
        assert [each.name for each in report.runs][3:] == ["plain, in float32", "switched, in float32"]
    with region:
        assert model(x).dtype == torch.bfloat16


def test_a_region_with_nothing_to_cast_is_judged_in_float32() -> None:
    model, x = tiny_net(dropout=0.0), batches()[0]

    def step(round_: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            torch.ones(2, 2) @ torch.ones(2, 2)
        output = model(x)
        if round_:
            output.register_hook(lambda gradient: gradient.bfloat16().float())
        output.square().mean().backward()
        model.zero_grad()

    assert verify(lambda: step(False), lambda: step(True)).verdict == "different"


def test_gradients_and_groups_stay_the_same_objects() -> None:
    training = Training(tiny_net(dropout=0.0))
    flat = torch.zeros(sum(each.numel() for each in training.model.parameters()))
    for each, part in zip(
        training.model.parameters(), flat.split([each.numel() for each in training.model.parameters()]), strict=True
    ):
        each.grad = part.view_as(each)
    flat.fill_(3.0)
    group = training.optimizer.param_groups[0]
    parameters, options = group["params"], list(group)
    verify(training, Training(training.model, learning_rate=0.1))
    assert torch.equal(torch.cat([each.grad.flatten() for each in training.model.parameters()]), flat)
    flat.fill_(4.0)
    assert all(bool((each.grad == 4).all()) for each in training.model.parameters())
    assert group["params"] is parameters
    assert list(group) == options


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "hook": lambda model: model[0].register_forward_hook(lambda module, args, output: 2 * output),
    "function": lambda model: setattr(model[0], "forward", lambda x: 2 * nn.Linear.forward(model[0], x)),
    "option": lambda model: setattr(model[2], "p", 0.9),
    "child": lambda model: setattr(model, "1", nn.Identity()),
    "parametrisation": lambda model: nn.utils.parametrizations.weight_norm(model[0]),
    "dtype": lambda model: model[3].bfloat16().register_forward_pre_hook(lambda module, args: args[0].bfloat16()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_the_switch_changes_in_a_model_is_taken_back(change: Callable[[nn.Sequential], Any]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, WIDTH))
    model.config = diffusers_config.FrozenDict(width=WIDTH)  # type: ignore[assignment]
    before = [type(model[0]), *map(id, model.modules()), *(dict(vars(each)) for each in model.modules())]
    x, calls = batches()[0], 0

    def step() -> None:
        model(x).float().square().mean().backward()

    def switched() -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            change(model)
        step()

    reports = [verify(step, switched) for _ in range(2)]
    assert [each.verdict for each in reports] == ["different", "different"]
    assert [type(model[0]), *map(id, model.modules()), *(dict(vars(each)) for each in model.modules())] == before
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_what_stays_on_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model, forward = tiny_net(dropout=0.0), nn.Tanh.forward
    model[1] = nn.Tanh()
    monkeypatch.setattr(nn.Tanh, "forward", forward)

    def step() -> None:
        model(batches()[0]).square().mean().backward()

    def switched() -> None:
        nn.Tanh.forward = lambda module, x: 2 * forward(module, x)  # type: ignore[method-assign, assignment]
        step()

    report = verify(step, switched)
    assert report.verdict == "not repeatable"
    assert "something that the switch changes stays on, such as a patched class" in report.advice


def test_expanded_buffers_are_kept() -> None:
    model = tiny_net(dropout=0.0)
    model.register_buffer("mask", torch.ones(1, 4).expand(8, 4))

    def step(fill: float) -> None:
        assert model.mask is not None
        loss = model(batches()[0]).square().mean()
        model.mask[0].fill_(fill)
        (loss * model.mask.mean()).backward()

    assert verify(lambda: step(2.0), lambda: step(3.0)).verdict == "different"
    assert bool((model.mask == 1).all())


def test_weights_without_a_shape_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="Sequential has weights without a shape yet: call it once before verify"):
        verify(lambda: model(torch.ones(2, 4)).sum().backward(), lambda: None)


@pytest.mark.parametrize("switched_on", ["around", "inside"])
def test_autocast_without_a_context_in_the_step(switched_on: str) -> None:
    model, x = tiny_net(dropout=0.0), batches()[0]

    def step(scale: float) -> None:
        was_on = torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled("cpu", True)
        (model(x).float().square().mean() * scale).backward()
        torch.set_autocast_enabled("cpu", was_on)
        model.zero_grad()

    with torch.autocast("cpu", torch.bfloat16, enabled=switched_on == "around"):
        report = verify(lambda: step(1.0), lambda: step(0.99))
        assert torch.is_autocast_enabled("cpu") == (switched_on == "around")
    assert report.verdict == "different"
    assert [run.name for run in report.runs][3:] == ["plain, in float32", "switched, in float32"]
