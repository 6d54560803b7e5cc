"""Tests of contexts: several backward passes, the scope of modes and hooks, names and signatures."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients import equal, take_gradients
from random_plans import plan_at_random
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, SyncCopier, wrap_forward_with_offload
from hf_memopt.activations import plan_maker
from hf_memopt.activations.planner.profile import Action

GIB = 2**30


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(4)))


BATCH = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))


def micro_batches(model: nn.Module) -> None:
    for part in BATCH.chunk(3):
        model(part).square().mean().backward()


def interleaved(model: nn.Module) -> None:
    losses = [model(part).square().mean() for part in BATCH.chunk(3)]
    for loss in losses:
        loss.backward()


def in_reverse(model: nn.Module) -> None:
    losses = [model(part).square().mean() for part in BATCH.chunk(3)]
    for loss in losses[::-1]:
        loss.backward()


def twice(model: nn.Module) -> None:
    loss = model(BATCH).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def with_a_metric(model: nn.Module) -> None:
    out = model(BATCH)
    out.square().mean().backward()
    out.softmax(-1).exp().mean()


PATTERNS = [micro_batches, interleaved, in_reverse, twice, with_a_metric]


@pytest.mark.sweep(share=1 / 3)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
@pytest.mark.parametrize("seed", range(6))
def test_what_is_predicted_of_several_backwards_is_what_is_measured(
    pattern: Callable[[nn.Module], None], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare peaks and copied bytes exactly, under random plans."""
    plan_by_lot = plan_at_random(seed, in_flight=seed % 3, ahead=seed // 2)
    monkeypatch.setattr(plan_maker, "make_plan", plan_by_lot)
    model = blocks()
    pattern(model)
    want = take_gradients(model)
    offloader = ActivationOffloader(offload_threshold_mb=0, copier=SyncCopier())
    for _ in range(4):
        moved = offloader.stats.bytes_moved
        with offloader.offload_context(model):
            pattern(model)
        assert equal(take_gradients(model), want)
    stats = offloader.stats
    (planner,) = offloader._planners[model].values()
    assert stats.measured_peak_gib == stats.predicted_peak_gib
    assert stats.bytes_moved - moved == planner.plan.offloaded_bytes


class Probe(nn.Module):
    """A module that counts the active dispatch modes when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.depths: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.depths.append(torch._C._len_torch_dispatch_stack())
        return x


class Block(nn.Module):
    """A block whose own product is recomputed, while its submodules' results are not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.probe = nn.Linear(16, 16), Probe()

    def forward(self, x: Tensor) -> Tensor:
        return self.probe(self.linear(x)).sigmoid() * 2


def test_operations_are_noted_only_where_results_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe inside a block that recomputes, between blocks, and outside of the model."""
    model = nn.Sequential(Probe(), Block(), Probe(), nn.Linear(16, 16), Probe(), Block(), Probe())
    outside = Probe()

    def recompute_what_blocks_compute(profile: Any, link: Any, **limits: Any) -> Any:
        plan = plan_at_random(0)(profile, link, **limits)
        actions = tuple(
            Action.RECOMPUTE if storage.recompute_s is not None and owner_is_linear(index) else Action.OFFLOAD
            for index, storage in enumerate(profile.storages)
        )
        return type(plan)(**{**vars(plan), "actions": actions})

    def owner_is_linear(index: int) -> bool:
        (planner,) = offloader._planners[model].values()
        owners = planner.recording.owners
        return index < len(owners) and owners[index] == "3"  # the module that saves the first block's result

    monkeypatch.setattr(plan_maker, "make_plan", recompute_what_blocks_compute)
    model(BATCH).square().mean().backward()
    want = take_gradients(model)
    offloader = ActivationOffloader(offload_threshold_mb=0, copier=SyncCopier())
    for _ in range(4):
        probes = [outside, *(module for module in model.modules() if isinstance(module, Probe))]
        for probe in probes:
            probe.depths.clear()
        before = offloader.stats.bytes_recomputed
        with offloader.offload_context(model):
            loss = outside(model(BATCH)).square().mean()
        loss.backward()
        assert equal(take_gradients(model), want)
    assert offloader.stats.bytes_recomputed > before
    assert [probe.depths for probe in probes] == [[0]] * len(probes)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_wrapped_forward_keeps_its_name_and_signature() -> None:
    """Check the signature, by which Trainer chooses a batch's columns."""
    layer = nn.Linear(4, 4)
    wrapped = wrap_forward_with_offload(layer.forward, copier=SyncCopier())
    assert inspect.signature(wrapped) == inspect.signature(layer.forward)
    assert wrapped.__name__ == "forward"
    assert wrapped.__doc__ == layer.forward.__doc__


def test_a_cpu_is_told_that_nothing_is_moved(caplog: pytest.LogCaptureFixture) -> None:
    offloader = ActivationOffloader(offload_threshold_mb=0)
    model = blocks()
    with caplog.at_level(logging.INFO, "hf_memopt"):
        for _ in range(3):
            with offloader.offload_context(model):
                loss = model(BATCH).mean()
            loss.backward()
    (line,) = (record.getMessage() for record in caplog.records)
    assert "nothing is moved" in line
    assert "SyncCopier()" in line
    assert "nothing is moved" in offloader.report().note
    assert offloader.stats.bytes_moved == 0


@pytest.mark.parametrize("mode", ["all", "auto"])
def test_a_noise_that_is_saved_before_it_is_drawn_is_refused(mode: str) -> None:
    """Check `torch.rrelu`, which cannot be told from other operations, unlike its functional form."""

    def loss(activate: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(0)
        y = activate(torch.ones(64, requires_grad=True) * -1, training=True)
        for _ in range(8):
            y = (y * 1.1).tanh()
        return y.sum()

    offloader = ActivationOffloader(mode=mode, offload_threshold_mb=0, copier=SyncCopier())
    with offloader.offload_context():
        value = loss(torch.rrelu)
    with pytest.raises(RuntimeError, match=r"torch\.nn\.functional\.rrelu"):
        value.backward()
    with offloader.offload_context():
        value = loss(nn.functional.rrelu)
    value.backward()


def test_a_leaf_that_requires_grad_stays() -> None:
    """Check a leaf that its gradient's accumulator holds anyway, and a write by `.data` that backward reads."""
    x = torch.ones(1024).requires_grad_()
    offloader = ActivationOffloader(mode="all", offload_threshold_mb=0, copier=SyncCopier(), prefetch_ahead=0)
    with offloader.offload_context():
        first = (x * x).sum()
        others = [(torch.randn(64, requires_grad=True) * 2).exp() for _ in range(4)]
        x.data.add_(1)
        second = (x * x).sum()
    assert len(others) == 4
    for loss in (first, second):
        assert torch.equal(torch.autograd.grad(loss, x)[0], torch.full((1024,), 4.0))
