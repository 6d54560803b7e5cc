"""Tests of contexts that are entered inside of a backward: gradient caching is offloaded, recomputation is not."""

from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from gradients import equal
from offload_trainers import everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memopt import ActivationOffloader


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def cached(module: nn.Module) -> list[Tensor]:
    """Return gradients of a loss whose hook runs the module forward and backward, twice."""
    loss = torch.ones((), requires_grad=True)

    def replay(gradient: Tensor) -> None:
        with torch.enable_grad():
            for seed in range(2):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
                (module(x).square().sum() * gradient).backward()

    loss.register_hook(replay)
    (loss * 3).backward()
    return gradients(module)


def moved_by(offloader: ActivationOffloader, module: nn.Module, run: Any) -> int:
    handle = offloader.wrap(module)
    run()
    handle.remove()
    assert offloader.stats.host_bytes_live == 0
    return offloader.stats.bytes_moved


@pytest.mark.parametrize("timing", ["early", "late"])
def test_a_forward_pass_in_a_backward_is_offloaded_for_the_backward_within(timing: str) -> None:
    want, offloaded, found = cached(model()), model(), []
    moved = moved_by(everything(AdversarialCopier(timing)), offloaded, lambda: found.extend(cached(offloaded)))
    assert equal(found, want)
    plain = moved_by(everything(), other := model(), lambda: other(torch.randn(4, 8)).square().sum().backward())
    assert moved == 2 * plain > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_checkpointing_computes_again_stays(use_reentrant: bool) -> None:
    """Check that a model inside of a checkpointed region moves no more than without checkpointing."""
    module = model()

    def run() -> None:
        x = torch.randn(4, 8, requires_grad=True)
        checkpoint(module, x, use_reentrant=use_reentrant).square().sum().backward()

    plain = moved_by(everything(), other := model(), lambda: other(torch.randn(4, 8)).square().sum().backward())
    assert moved_by(everything(), module, run) <= plain
