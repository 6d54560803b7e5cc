"""Tests of selective checkpointing with in-place writes: kept outputs, views that torch does not track, buffers."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from checkpointed_models import MAPS, UNIT, D, N, equal, gradients, keep_everything, offloader
from torch import Tensor, nn

from hf_memopt.activations.checkpointing.selective import SelectiveCheckpoint
from hf_memopt.memory import SavedBytes


def test_what_the_region_modifies_in_place_is_recomputed() -> None:
    linear = nn.Linear(D, D)
    x = torch.randn(N, D, requires_grad=True)
    with SavedBytes(linear.parameters()) as saved:
        SelectiveCheckpoint()(lambda x: linear(x).relu_().exp(), x)
    assert saved.total_bytes == UNIT  # x


class Gates(nn.Module):
    """The gates of a recurrent cell as in torch's own CPU kernels: one storage, four version counters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, 4 * D)

    def forward(self, x: Tensor) -> Tensor:
        i, f, g, o = self.linear(x).unsafe_chunk(4, -1)
        return o.sigmoid_() * (i.sigmoid_() * g.tanh_() + f.sigmoid_()).tanh()


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "gates": Gates,
    "GRU": lambda: nn.GRU(D, D, num_layers=2, dropout=0.1),
    "LSTM": lambda: nn.LSTM(D, D, num_layers=2, proj_size=4),
    "GRUCell": lambda: nn.GRUCell(D, D),
    "LSTMCell": lambda: nn.LSTMCell(D, D),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("policy", ["heavy_ops", "alternate", keep_everything])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str, policy: Any, offloaded: bool) -> None:
    torch.manual_seed(0)
    module = RECURRENT[name]()
    x = torch.randn(3, N, D) if name in ("GRU", "LSTM") else torch.randn(N, D)

    def loss(run: Callable[..., Any]) -> Tensor:
        output = run(module, x)
        return (output[0] if isinstance(output, tuple) else output).square().sum()

    want = gradients(module, lambda module: loss(lambda module, x: module(x)))
    context = offloader().offload_context(module) if offloaded else None
    assert equal(gradients(module, lambda module: loss(SelectiveCheckpoint(policy)), context), want)


def data_of(product: Tensor) -> Tensor:
    return product.data


def unsafe_chunk_of(product: Tensor) -> Tensor:
    return product.unsafe_chunk(2)[0]


def set_to(product: Tensor) -> Tensor:
    return torch.empty(0).set_(product.detach())  # type: ignore[call-overload]


def product_with_bias(x: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(torch.ones(()), x, w)


def product_and_unsafe_view(x: Tensor, w: Tensor) -> Tensor:
    return x.reshape(2, -1, D) @ w


def keep_unsafe_views(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    return "unsafe" in operation.name()


ALIASES = [data_of, unsafe_chunk_of, set_to]
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda alias: alias.mul_(2),
    "out": lambda alias: torch.mul(alias, 2, out=alias),
    "foreach": lambda alias: torch._foreach_mul_([alias], 2),
    "view": lambda alias: alias[0].mul_(2),
}


@pytest.mark.parametrize("policy", ["heavy_ops", keep_unsafe_views])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("alias_of", ALIASES)
@pytest.mark.parametrize("product_of", [product_with_bias, product_and_unsafe_view])
def test_writes_that_the_version_of_a_kept_output_does_not_count(
    product_of: Any, alias_of: Any, write: str, policy: Any
) -> None:
    x, w = torch.randn(N, D, requires_grad=True), torch.randn(D, D, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        product = product_of(x, w)
        with torch.no_grad():
            WRITES[write](alias_of(product))
        return product.exp()

    want = torch.autograd.grad(region(x).sum(), [x, w])
    assert equal(torch.autograd.grad(SelectiveCheckpoint(policy)(region, x).sum(), [x, w]), want)


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("policy", ["heavy_ops", keep_unsafe_views, keep_everything])
@pytest.mark.parametrize("alias_of", [lambda product: product, unsafe_chunk_of, set_to])
@pytest.mark.parametrize("product_of", [product_with_bias, product_and_unsafe_view])
def test_what_is_modified_after_the_region_is_recomputed(
    product_of: Any, alias_of: Any, policy: Any, offloaded: bool
) -> None:
    """Check a modification of the product, which the plain run allows because it does not need the product."""
    x, w = torch.randn(N, D, requires_grad=True), torch.randn(D, D, requires_grad=True)

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        product = product_of(x, w)
        return alias_of(product), product.exp()

    _, y = region(x)
    want = torch.autograd.grad(y.sum(), [x, w])
    with offloader().offload_context() if offloaded else nullcontext():
        alias, y = SelectiveCheckpoint(policy)(region, x)
    with torch.no_grad():
        alias.add_(1)
    assert equal(torch.autograd.grad(y.sum(), [x, w], retain_graph=True), want)
    assert equal(torch.autograd.grad(y.sum(), [x, w]), want)


def test_a_view_that_torch_does_not_call_one_is_kept_with_what_it_views() -> None:
    """Check both views: a kept view without its product would keep the product alive under any policy."""
    x, w = torch.randn(2, N, D, requires_grad=True), nn.Parameter(torch.randn(D, D))
    with SavedBytes([w]) as saved:
        SelectiveCheckpoint()(lambda x: (x @ w).exp(), x)
    with SavedBytes([w]) as saved_with_views:
        SelectiveCheckpoint(keep_unsafe_views)(lambda x: (x @ w).exp(), x)
    assert saved.total_bytes == 4 * UNIT  # x and the product
    assert saved_with_views.total_bytes == 2 * UNIT


class Counter1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Replacing(Counter1):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x


WRITERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (lambda: nn.BatchNorm2d(4), "'1' .BatchNorm2d. in Sequential .*'running_mean'"),
    "instance norm": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), "InstanceNorm2d.*'running_mean'"),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1)), "_SpectralNorm.*'_u'"),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Conv2d(4, 4, 1)), "'1' .Conv2d.*'weight_u'"),
    "own counter": (Counter1, "'1' .Counter1.*'calls'"),
    "replaced buffer": (Replacing, "'1' .Replacing.*'calls'"),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")  # still in many checkpoints
@pytest.mark.parametrize("writer", WRITERS)
def test_modules_that_write_buffers_are_refused(writer: str) -> None:
    make, complaint = WRITERS[writer]
    block = nn.Sequential(nn.Conv2d(4, 4, 1), make()).train()
    with pytest.raises(ValueError, match=complaint):
        SelectiveCheckpoint()(block, MAPS)
    with pytest.raises(ValueError, match=complaint):
        SelectiveCheckpoint()(block.forward, MAPS)


@pytest.mark.parametrize(
    "make", [lambda: nn.BatchNorm2d(4).eval(), lambda: nn.InstanceNorm2d(4), lambda: nn.GroupNorm(2, 4)]
)
def test_normalisation_without_statistics_to_write_is_not_refused(make: Callable[[], nn.Module]) -> None:
    block = nn.Sequential(nn.Conv2d(4, 4, 1), make())
    want = gradients(block, lambda block: block(MAPS).exp().sum())
    assert equal(gradients(block, lambda block: SelectiveCheckpoint()(block, MAPS).exp().sum()), want)
