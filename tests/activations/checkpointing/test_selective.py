"""Tests of selective checkpointing: bitwise gradients, exactly the policy's bytes, and no needless recomputation."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from checkpointed_models import (
    MODELS,
    POLICIES,
    UNIT,
    D,
    Mlp,
    N,
    Operations,
    build,
    equal,
    gradients,
    keep_everything,
    offloader,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from hf_memopt.activations import ActivationOffloader
from hf_memopt.activations.checkpointing.selective import SelectiveCheckpoint, apply_selective_checkpointing
from hf_memopt.memory import SavedBytes
from hf_memopt.transfer import SyncCopier

# ------------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("policy", [*POLICIES, keep_everything])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_bitwise_the_plain_ones(name: str, policy: Any, autocast: bool) -> None:
    model, loss = build(name)

    def value(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss(model)

    want = gradients(model, value)
    apply_selective_checkpointing(model, policy)
    assert equal(gradients(model, value), want)
    assert equal(gradients(model, value, offloader().offload_context(model)), want)


@pytest.mark.parametrize("schedule", ["early", "late", "random"])
@pytest.mark.parametrize("policy", POLICIES)
def test_offloaded_gradients_whenever_copies_happen(policy: str, schedule: str) -> None:
    model, loss = build("qwen3")
    want = gradients(model, loss)
    apply_selective_checkpointing(model, policy)
    offloading = offloader(AdversarialCopier(schedule))
    for _ in range(3):
        assert equal(gradients(model, loss, offloading.offload_context(model)), want)
    assert offloading.stats.bytes_moved > 0
    assert offloading.stats.host_bytes_live == 0


@pytest.mark.parametrize("policy", [*POLICIES, keep_everything])
@pytest.mark.parametrize("offloaded", [False, True])
def test_several_backwards_and_double_backward(policy: Any, offloaded: bool) -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        return dropout(torch.tanh(x @ w), 0.5) @ w.T

    def run(region: Callable[[Tensor], Tensor], context: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        with context:
            y = region(x).sin()
        once = torch.autograd.grad(y.sum(), [x, w], retain_graph=True)
        again = torch.autograd.grad(y.sum(), [x, w], create_graph=True)
        penalty = sum(g.square().sum() for g in again)
        return [*once, *again, *torch.autograd.grad(penalty, [x, w])]

    want = run(region, nullcontext())
    context = offloader().offload_context() if offloaded else nullcontext()
    assert equal(run(lambda x: SelectiveCheckpoint(policy)(region, x), context), want)


def bilinear(run: Callable[..., Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    layer = nn.Bilinear(3, 4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(layer, torch.randn(2, 3), torch.randn(2, 4))
    return [y.detach(), *torch.autograd.grad(y.float().sum(), layer.parameters())]


def complex_inverse(run: Callable[..., Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(5, 5, dtype=torch.complex64, requires_grad=True)
    y = run(lambda x: torch.linalg.pinv(x * 1), x)
    return [y.detach(), *torch.autograd.grad((y * y.mH).abs().sum(), x)]


def inverse_under_autocast(run: Callable[..., Tensor]) -> list[Tensor]:
    """Return an inverse and its gradients, which autocast computes in float32 with all products inside."""
    torch.manual_seed(0)
    x = torch.randn(5, 5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(lambda x: torch.pinverse(x * 1), x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), x)]


@pytest.mark.parametrize("mode", [None, "all", "auto"])
@pytest.mark.parametrize("policy", [*POLICIES, keep_everything])
@pytest.mark.parametrize("compute", [bilinear, complex_inverse, inverse_under_autocast])
def test_operations_that_call_others_see_autocast_and_lazy_bits(compute: Any, policy: Any, mode: str | None) -> None:
    """Compare operations that torch computes differently inside a dispatch mode."""
    want = compute(lambda function, *args: function(*args))
    offloading = ActivationOffloader(mode=mode or "all", offload_threshold_mb=0, copier=SyncCopier())
    for _ in range(3):
        with offloading.offload_context() if mode else nullcontext():
            got = compute(lambda function, *args: SelectiveCheckpoint(policy)(function, *args))
        assert equal(got, want)


def test_random_operations_are_recomputed() -> None:
    """Check under every policy, since the dropout behind a random operation has to draw the same numbers again."""

    def region(x: Tensor) -> Tensor:
        return dropout(torch.rand_like(x) * x, 0.5).exp()

    x = torch.ones(100, requires_grad=True)
    found = []
    for run in (region, lambda x: SelectiveCheckpoint(keep_everything)(region, x)):
        torch.manual_seed(0)
        found.append(torch.autograd.grad(run(x).sum(), [x])[0])
    assert torch.equal(*found)


# ------------------------------------------------------------------------------------------------ bytes and operations

F = 2 * N * D * 4 * D + 2 * N * 4 * D * D

# Saved: plain x, up(x), its gelu, tanh's output. Multiples of F: forward, backward for both gradients, recomputation.
EXACT = {
    None: (1 + 4 + 4 + 1, 1 + 2 + 0),
    "all": (1, 1 + 2 + 1),
    "heavy_ops": (1 + 4 + 1, 1 + 2 + 0),
    "alternate": (1 + 4, 1 + 2 + 0.5),
}


def run_mlp(policy: str | None, mlp: nn.Module, x: Tensor) -> Tensor:
    return mlp(x) if policy is None else SelectiveCheckpoint(policy)(mlp, x)


@pytest.mark.parametrize("policy", EXACT)
def test_saved_bytes(policy: str | None) -> None:
    mlp, x = Mlp(), torch.randn(N, D, requires_grad=True)
    with SavedBytes(mlp.parameters()) as saved:
        run_mlp(policy, mlp, x)
    assert saved.total_bytes == EXACT[policy][0] * UNIT


@pytest.mark.parametrize("policy", EXACT)
def test_offloaded_bytes_are_all_the_saved_ones(policy: str | None) -> None:
    mlp, x = Mlp(), torch.randn(N, D, requires_grad=True) + 0  # no leaf, since leaves stay on the device as weights do
    offloading = offloader()
    with offloading.offload_context(mlp):
        y = run_mlp(policy, mlp, x)
    assert offloading.stats.bytes_moved == EXACT[policy][0] * UNIT
    y.sum().backward()
    assert offloading.stats.host_bytes_live == 0


@pytest.mark.parametrize("policy", EXACT)
def test_operations(policy: str | None) -> None:
    mlp, x = Mlp(), torch.randn(N, D, requires_grad=True)
    with FlopCounterMode(display=False) as flops:
        run_mlp(policy, mlp, x).sum().backward()
    assert flops.get_total_flops() == EXACT[policy][1] * F


@pytest.mark.parametrize(("policy", "recomputed"), [("heavy_ops", 0), ("alternate", 1), ("all", 2)])
@pytest.mark.parametrize(
    ("operation", "region"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu", scaled_dot_product_attention),
        ("aten::convolution", lambda x, y, z: torch.conv2d(x, y[:, :, :1, :1])),
        ("aten::bmm", lambda x, y, z: x @ y.mT),
        ("aten::baddbmm", lambda x, y, z: torch.baddbmm(x[0], y[0], z[0, :, :4, :4])[None]),
    ],
)
def test_heavy_operations_recomputed(policy: str, recomputed: int, operation: str, region: Any) -> None:
    x = torch.randn(2, 2, 4, 4, requires_grad=True)

    def twice(x: Tensor) -> Tensor:
        return region(region(x, x, x).exp(), x, x).exp()

    y = SelectiveCheckpoint(policy)(twice, x).sum()
    with Operations() as operations, torch.autograd.set_multithreading_enabled(False):
        y.backward()
    in_backward = 2 if operation == "aten::bmm" else 0
    assert operations.counts["aten::exp"] == 2
    assert operations.counts[operation] - 2 * in_backward == recomputed


# ------------------------------------------------------------------------------------------------ calls


def test_arguments_pass_through_and_are_saved_wherever_they_are() -> None:
    def region(x: Tensor, *, debug: str, pair: tuple[Tensor, list[Tensor]], context_fn: None) -> dict[str, Any]:
        return {"y": (x * pair[0]).exp() * pair[1][0], "debug": debug, "context_fn": context_fn}

    tensors = [torch.randn(N, D, requires_grad=True) for _ in range(3)]
    pair = tensors[1], [tensors[2]]
    plain = region(tensors[0], debug="text", pair=pair, context_fn=None)
    want = torch.autograd.grad(plain["y"].sum(), tensors)
    with SavedBytes() as saved:
        output = SelectiveCheckpoint("all")(region, tensors[0], debug="text", pair=pair, context_fn=None)
    assert output.keys() == plain.keys()
    assert output["debug"] == "text"
    assert equal(torch.autograd.grad(output["y"].sum(), tensors), want)
    assert saved.total_bytes == 3 * UNIT


def test_without_gradients_it_is_a_plain_call() -> None:
    class Counting(nn.BatchNorm1d):
        pass

    module = Counting(D)
    with torch.no_grad():
        y = SelectiveCheckpoint()(module, torch.randn(N, D))
    assert not y.requires_grad
    assert module.num_batches_tracked == 1


def test_a_policy_function_is_asked_once_per_operation() -> None:
    asked: list[str] = []

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> torch.utils.checkpoint.CheckpointPolicy:
        assert not context.is_recompute
        asked.append(operation.name())
        return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(N, D, requires_grad=True)
    SelectiveCheckpoint(policy)(lambda x: (x.detach() * x).exp(), x).sum().backward()
    assert asked == ["aten::mul.Tensor", "aten::exp"]


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"policy='heavy' is unknown; use one of \['all', 'alternate', 'heavy_ops'\]"):
        SelectiveCheckpoint("heavy")


class InjectedError(RuntimeError):
    pass


@pytest.mark.parametrize("ending", ["backward", "retained", "dropped", "exception"])
def test_nothing_is_held(ending: str) -> None:
    products: list[StorageWeakRef] = []

    def region(x: Tensor) -> Tensor:
        product = x @ x.T
        products.append(StorageWeakRef(product.untyped_storage()))
        if ending == "exception":
            raise InjectedError
        return product.exp().exp()

    def run() -> None:
        try:
            y = SelectiveCheckpoint()(region, torch.randn(N, D, requires_grad=True))
        except InjectedError:
            return
        if ending in ("backward", "retained"):
            y.sum().backward(retain_graph=ending == "retained")

    run()
    gc.collect()
    assert products
    assert all(product.expired() for product in products)


def test_recomputed_tensors_do_not_outlive_a_backward() -> None:
    waves: list[StorageWeakRef] = []

    def region(x: Tensor) -> Tensor:
        wave = x.sin()
        waves.append(StorageWeakRef(wave.untyped_storage()))
        return (wave @ wave.T).exp()

    y = SelectiveCheckpoint()(region, torch.randn(N, D, requires_grad=True))
    y.sum().backward(retain_graph=True)
    gc.collect()
    assert [wave.expired() for wave in waves] == [True, True]
