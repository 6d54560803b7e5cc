from collections.abc import Callable
from typing import Any

import torch
from leaky_steps import toy, toy_step
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_memopt.memory.leaks.detect import LeakMonitor
from hf_memopt.memory.leaks.live_storages import live_storages


def test_looking_changes_nothing() -> None:
    """Compare weights and random numbers bitwise."""

    def trained(look: Callable[[], object]) -> list[Tensor]:
        torch.manual_seed(0)
        model, optimizer = toy()
        for _ in range(5):
            toy_step(model, optimizer)
            look()
        return [*(p.detach() for p in model.parameters()), torch.rand(3)]

    watched, alone = trained(LeakMonitor(1).step), trained(lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))


def kinds_of(tensor: Tensor) -> set[str]:
    return {entry.kind for entry in live_storages()[tensor.untyped_storage()._cdata]}


def test_census_finds_what_a_graph_alone_holds() -> None:
    weights = torch.randn(4, 4, requires_grad=True)
    hidden = weights.exp()
    address = hidden.untyped_storage()._cdata
    loss = (hidden * 2).sum()
    del hidden
    held = live_storages()
    assert (held[address][-1].kind, held[address][-1].node) == ("saved for backward", "ExpBackward0")
    assert held[address][-1].root is loss
    del held
    loss.backward()
    assert address not in live_storages()
    assert kinds_of(weights.grad) == {"tensor", "gradient"}


def test_census_unpacks_nothing() -> None:
    """Run neither a saved-tensor hook nor a checkpointed region."""
    calls = []
    hidden = torch.randn(4, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ("packed", t), lambda p: calls.append("unpack") or p[1]):
        packed = (hidden.exp() * 2).sum()
    recomputed = checkpoint(lambda x: calls.append("forward") or x.exp().sin(), hidden, use_reentrant=False)
    live_storages()
    assert calls == ["forward"]
    (packed + recomputed.sum()).backward()
    assert calls.count("unpack") == 1
    assert calls.count("forward") == 2


def test_census_passes_over_custom_functions_that_backward_freed() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x * 1)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    output = Double.apply(torch.ones(3, requires_grad=True)).sum()
    before = len(live_storages())
    output.backward()
    assert len(live_storages()) <= before  # backward releases the saved product and adds a gradient
