"""Tests of the operations that a policy keeps, and of the recomputation of all others."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from hf_memopt.activations.checkpointing.save_policies import POLICIES, KeepOutputs, Policy, ReplayOutputs, may_be_kept

aten = torch.ops.aten


class Calls(TorchDispatchMode):
    """A mode that lists the names of operations, except `detach`, which hands out kept outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not aten.detach.default:
            self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def made(name: str) -> Policy:
    policy = POLICIES[name]()
    assert policy is not None
    return policy


def products(x: Tensor) -> list[Tensor]:
    """Return two products with a light operation in between."""
    first = x.mm(x)
    second = first.exp().mm(x)
    return [first, second]


def keeping(policy: Policy, x: Tensor) -> tuple[KeepOutputs, list[Tensor]]:
    mode = KeepOutputs(policy)
    with mode:
        results = products(x)
    mode.save()
    return mode, results


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def always(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def never(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("policy", "again"),
    [("heavy_ops", ["exp"]), ("alternate", ["exp", "mm"]), (always, []), (never, ["mm", "exp", "mm"])],
)
def test_a_replay_runs_what_was_not_kept(policy: str | Policy, again: list[str], x: Tensor) -> None:
    mode, results = keeping(made(policy) if isinstance(policy, str) else policy, x)
    replaying = ReplayOutputs(mode.kept)
    for _ in range(2):  # the mode begins anew at each entry
        with Calls() as calls, replaying:
            replayed = products(x)
        assert calls.names == again
        assert all(torch.equal(*pair) for pair in zip(replayed, results, strict=True))


def test_the_policy_that_counts_begins_anew_in_each_region(x: Tensor) -> None:
    sizes = [len(keeping(made("alternate"), x)[0].kept) for _ in range(2)]
    assert sizes == [1, 1]
    assert POLICIES["all"]() is None


def test_nothing_is_kept_before_the_region_is_over(x: Tensor) -> None:
    mode = KeepOutputs(always)
    with mode:
        products(x)
    assert mode.kept == {}


def test_what_the_region_writes_later_is_not_kept(x: Tensor) -> None:
    mode = KeepOutputs(always)
    with mode:
        x.mm(x).data.mul_(2)  # a write that no version shows
        x.mm(x)
    mode.save()
    assert list(mode.kept) == [(aten.mm.default, 1)]


def test_what_was_written_after_the_region_is_computed_again(x: Tensor) -> None:
    mode, results = keeping(made("heavy_ops"), x)
    want = results[0].clone()
    results[0].add_(1)
    with Calls() as calls, ReplayOutputs(mode.kept):
        replayed = products(x)
    assert calls.names == ["mm", "exp"]
    assert torch.equal(replayed[0], want)


@pytest.mark.parametrize(
    ("operation", "before"),
    [
        (torch.ops.aten._scaled_dot_product_flash_attention.default, 3),
        (torch.ops.aten._scaled_dot_product_efficient_attention.default, 5),
        (torch.ops.aten._scaled_dot_product_cudnn_attention.default, 5),
    ],
)
def test_attention_is_kept_unless_it_drops_out(operation: Any, before: int) -> None:
    """Check accelerators' attention kernels: with dropout they have to run again in recomputation."""
    query_to_dropout = (None,) * before
    assert may_be_kept(operation, query_to_dropout, {})
    assert may_be_kept(operation, (*query_to_dropout, 0.0), {})
    assert may_be_kept(operation, query_to_dropout, {"dropout_p": 0.0})
    assert not may_be_kept(operation, (*query_to_dropout, 0.1), {})
    assert not may_be_kept(operation, query_to_dropout, {"dropout_p": 0.1})


def test_views_and_writes_are_recomputed() -> None:
    assert may_be_kept(aten.mm.default, (), {})
    for operation in (aten.t.default, aten.mm.out, aten.relu_.default, aten._foreach_mul_.Scalar):
        assert not may_be_kept(operation, (), {})


@torch.library.custom_op("save_policies::product", mutates_args=(), device_types="cpu")
def product(left: Tensor, right: Tensor) -> Tensor:
    """An operator for the device that calls other operations."""
    return (left @ right).float()


@pytest.mark.parametrize("mode", [KeepOutputs(made("heavy_ops")), ReplayOutputs({})], ids=["keeping", "replaying"])
def test_a_kernel_for_the_device_calls_others_as_it_does_outside(mode: TorchDispatchMode, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        want = product(x, x)
        with mode:
            got = product(x, x)
    assert torch.equal(got, want)
    assert not torch.equal(got, x @ x)
