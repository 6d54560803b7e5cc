"""Tests of the ways through autograd, and around it, that a frozen base may be read in."""

import functools
import threading
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from frozen_bases import WIDTH, adapted, ids, same, square_loss, streamed, train, trainable
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, linearize, vmap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


def func_grad(model: nn.Module) -> list[Tensor]:
    adapters = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    return [*grad(lambda values: functional_call(model, values, (ids(),)).square().mean())(adapters).values()]


def gradients_per_sample(model: nn.Module) -> list[Tensor]:
    adapters = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    of_one = grad(lambda values, sample: functional_call(model, values, (sample[None],)).square().mean())
    return [*vmap(of_one, (None, 0))(adapters, ids()).values()]


def func_jvp(model: nn.Module) -> list[Tensor]:
    return [*jvp(model.layers[0], (X,), (torch.ones_like(X),))]


def forward_mode(model: nn.Module) -> list[Tensor]:
    with forward_ad.dual_level():
        return [*forward_ad.unpack_dual(model.layers[0](forward_ad.make_dual(X, torch.ones_like(X))))]


def jacobian(model: nn.Module) -> list[Tensor]:
    return [torch.autograd.functional.jacobian(lambda x: model.layers[0](x).sum(0), X)]


def batched_gradients(model: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    vectors = torch.randn(5, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    return [*torch.autograd.grad(model.layers[0](x), x, vectors, is_grads_batched=True)]


def inference_mode(model: nn.Module) -> list[Tensor]:
    with torch.inference_mode():
        return [model(ids()).clone()]


def selective_checkpointing(model: nn.Module) -> list[Tensor]:
    def policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_product = operation == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    def two_layers(x: Tensor) -> Tensor:
        return model.layers[1](model.layers[0](x).tanh()).tanh()

    x = X.clone().requires_grad_()
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(two_layers, x, use_reentrant=False, context_fn=contexts).square().sum().backward()
    return [x.grad]


def selective_checkpointing_of_views(model: nn.Module) -> list[Tensor]:
    """Save what the engine's own work consists of, too."""
    aten = torch.ops.aten
    saved = {aten.slice.Tensor, aten.copy_.default, aten.view.default, aten.t.default, aten.detach.default}

    def policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x: Tensor) -> Tensor:
        return model.layers[1](model.layers[0](x)[:, : WIDTH // 2].tanh().repeat(1, 2)).tanh()

    x = X.clone().requires_grad_()
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(block, x, use_reentrant=False, context_fn=contexts).square().sum().backward()
    return [x.grad]


def captured_inputs(model: nn.Module) -> list[Tensor]:
    """Ask for the gradient of what a hook has got, which other layers read as well."""
    captured: list[Tensor] = []
    hooks = [
        layer.base.register_forward_hook(lambda module, args, output: captured.append(args[0]))
        for layer in model.layers[1:]
    ]
    loss = square_loss(model)
    for hook in hooks:
        hook.remove()
    return [*torch.autograd.grad(loss, captured)]


def gradients_turned_on_inside(model: nn.Module) -> list[Tensor]:
    layer = model.layers[0]
    x = X.clone().requires_grad_()

    def forward(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return kind.forward(layer, x)

    kind: Any = type(layer)
    layer.forward = forward
    with torch.no_grad():
        y = layer(x)
    del layer.forward
    return [*torch.autograd.grad(y.square().sum(), x)]


def sparse_inputs(model: nn.Module) -> list[Tensor]:
    x = X.relu().requires_grad_()
    y = nn.functional.linear((x * 1).to_sparse(), model.layers[0].base.weight)
    return [*torch.autograd.grad(y.square().sum(), x)]


def linearized(model: nn.Module) -> list[Tensor]:
    adapters = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    tokens = ids()
    logits, push = linearize(lambda values: functional_call(model, values, (tokens,)), adapters)
    return [logits, push({name: torch.ones_like(each) for name, each in adapters.items()})]


def traced(model: nn.Module) -> list[Tensor]:
    from torch.fx.experimental.proxy_tensor import make_fx

    return [make_fx(model)(ids())(ids(seed=5))]


def weights_in_hooks_under_autocast(model: nn.Module) -> list[Tensor]:
    """Read the weight before and after each call, and in a forward that was replaced while the weights stream."""
    norms: list[Tensor] = []
    layers = [layer.base for layer in model.layers]
    hooks = [each.register_forward_pre_hook(lambda module, args: norms.append(module.weight.norm())) for each in layers]
    hooks += [each.register_forward_hook(lambda module, args, y: norms.append(module.weight.norm())) for each in layers]
    first: Any = layers[0]
    kind: Any = type(first)

    def in_float32(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x.float(), first.weight) / first.weight.norm()

    first.forward = in_float32
    with torch.autocast("cpu", torch.bfloat16):
        loss = square_loss(model)
    loss.backward()
    del first.forward
    for hook in hooks:
        hook.remove()
    assert type(first) is kind
    return [loss.detach(), *norms, *take(model)]


def hessian(model: nn.Module) -> list[Tensor]:
    x = torch.full((WIDTH,), 0.1)
    return [torch.autograd.functional.hessian(lambda x: model.layers[0](x).tanh().square().sum(), x)]


def products_with_one_graph_of_gradients(model: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(nn.Sequential(*model.layers[:2])(x).tanh().sum(), x, create_graph=True)
    return [torch.autograd.grad(gradient, x, vector, retain_graph=True)[0] for vector in (X, X.sin(), X.cos())]


def other_thread(model: nn.Module) -> list[Tensor]:
    thread = threading.Thread(target=lambda: square_loss(model).backward())
    thread.start()
    thread.join()
    return take(model)


def anomaly_detection(model: nn.Module) -> list[Tensor]:
    with torch.autograd.detect_anomaly():
        square_loss(model).backward()
    return take(model)


def two_losses_of_one_forward(model: nn.Module) -> list[Tensor]:
    y = model(ids())
    y.square().mean().backward(retain_graph=True)
    y.sin().mean().backward()
    return take(model)


def one_loss_of_two_forwards(model: nn.Module) -> list[Tensor]:
    (model(ids(seed=3)).square().mean() * model(ids(seed=4)).square().mean()).backward()
    return take(model)


def nested_backward(model: nn.Module) -> list[Tensor]:
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            with torch.enable_grad():
                square_loss(model).backward()
            return gradient

    x = X.clone().requires_grad_()
    model.layers[1](Inner.apply(model.layers[0](x))).square().sum().backward()
    return [x.grad, *take(model)]


def take(model: nn.Module) -> list[Tensor]:
    found = [each.grad for each in trainable(model) if each.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by forward-mode AD
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # by linearize
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize(
    "way",
    [
        func_grad,
        gradients_per_sample,
        func_jvp,
        forward_mode,
        jacobian,
        batched_gradients,
        inference_mode,
        selective_checkpointing,
        selective_checkpointing_of_views,
        captured_inputs,
        gradients_turned_on_inside,
        sparse_inputs,
        linearized,
        weights_in_hooks_under_autocast,
        hessian,
        products_with_one_graph_of_gradients,
        traced,
        other_thread,
        anomaly_detection,
        two_losses_of_one_forward,
        one_loss_of_two_forwards,
        nested_backward,
    ],
    ids=lambda way: way.__name__,
)
@pytest.mark.parametrize("home", ["host", "file"])
@pytest.mark.sweep(share=0.15)
def test_results_are_those_of_the_resident_run(
    way: Callable[[nn.Module], list[Tensor]], home: str, tmp_path: Path
) -> None:
    want = way(adapted())
    model = adapted()
    base = streamed(model, home=home, disk=tmp_path)
    for _ in range(3):
        with base.stream():
            got = way(model)
        assert same(got, want)
    # A backward that records a graph leaves weights, until a later one has ended.
    with base.stream():
        loss = square_loss(model)
    loss.backward()
    with base.stream():
        assert base.report().device_bytes == 0


@dataclass(slots=True)
class InSlots:
    found: Tensor


class InPrivateSlots:
    """An object that has its tensor under a mangled name, and an empty slot."""

    __slots__ = ("__found", "empty")

    def __init__(self, found: Tensor) -> None:
        self.__found = found

    def take(self) -> Tensor:
        return self.__found


class HandsOut(nn.Module):
    """A layer that hands its result out in an object."""

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self._pack = pack

    def forward(self, x: Tensor) -> Any:
        return self._pack(x @ self.weight)


@pytest.mark.parametrize(
    ("pack", "take"),
    [
        (InSlots, lambda handed: handed.found),
        (InPrivateSlots, InPrivateSlots.take),
        (lambda y: deque([y]), lambda handed: handed[0]),
        (lambda y: MappingProxyType({"a": 1, "y": y}), lambda handed: handed["y"]),
        (lambda y: {"y": y}.values(), lambda handed: next(iter(handed))),
        (lambda y: UserDict(y=[InSlots(y)]), lambda handed: handed["y"][0].found),
        (lambda y: deque([*range(990), y]), lambda handed: handed[-1]),
        (lambda y: [numpy.zeros(10), b"bytes", y], lambda handed: handed[-1]),
    ],
)
def test_results_may_be_in_any_container(pack: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), HandsOut(pack))

    def loss(model: nn.Module) -> Tensor:
        return take(model(X)).square().mean()

    model = make()
    assert same(train(model, loss, streamed(model)), train(make(), loss))


class Collects(nn.Module):
    """A layer that puts its result into a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor, found: list[Tensor]) -> None:
        found.append(x @ self.weight)


@pytest.mark.parametrize("by_name", [False, True])
def test_results_may_be_put_into_a_given_container(by_name: bool) -> None:
    def make() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(WIDTH, WIDTH), Collects()])

    def loss(model: Any) -> Tensor:
        found: list[Tensor] = []
        x = model[0](X)
        model[1](x, found=found) if by_name else model[1](x, found)
        return found[0].square().mean()

    model = make()
    assert same(train(model, loss, streamed(model)), train(make(), loss))


def test_a_graph_of_gradients_may_wait_for_another_forward() -> None:
    def penalised(model: nn.Module) -> list[Tensor]:
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(nn.Sequential(*model.layers)(x).tanh().sum(), x, create_graph=True)
        return [gradient.square().sum()]

    plain, model = adapted(), adapted()
    base = streamed(model)
    for _ in range(2):
        want = penalised(plain)[0] + square_loss(plain)
        with base.stream():
            (penalty,) = penalised(model)
        with base.stream():
            loss = penalty + square_loss(model)
        want.backward()
        loss.backward()
        assert same(take(model), take(plain))
    with base.stream():
        assert base.report().device_bytes == 0
