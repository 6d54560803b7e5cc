"""Tests of activation offloading in an Accelerate loop, with a gradient scaler, and around a compiled module."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from adversarial_copier import AdversarialCopier
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, SyncCopier


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.Tanh())


def batches(num: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, generator=generator) for _ in range(num)]


def everything(copier: Any = None) -> ActivationOffloader:
    return ActivationOffloader(mode="all", offload_threshold_mb=0, copier=copier or SyncCopier())


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def train_with_accelerate(offloader: ActivationOffloader | None, mixed_precision: str = "no") -> list[Tensor]:
    """Train by the documentation's loop, in which offloading takes the offloader, the context and its body."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision)
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(batches(), None))
    for batch in data:
        with accelerator.accumulate(model):
            with offloader.offload_context(model) if offloader else nullcontext():
                loss = (model(batch) - batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("schedule", [None, "late", "random"])
def test_the_accelerate_loop(mixed_precision: str, schedule: str | None) -> None:
    offloader = everything(AdversarialCopier(schedule) if schedule else SyncCopier())
    want = train_with_accelerate(None, mixed_precision)
    assert equal(train_with_accelerate(offloader, mixed_precision), want)
    assert offloader.stats.bytes_moved > 0
    assert offloader.stats.host_bytes_live == 0


def train_with_scaler(offloader: ActivationOffloader | None) -> tuple[list[Tensor], list[float]]:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4)
    scales = []
    for batch in batches():
        with offloader.offload_context(model) if offloader else nullcontext():
            loss = (model(batch) - batch).square().sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return weights(model), scales


def test_a_gradient_scaler_that_skips_steps() -> None:
    """Begin with so large a scale that gradients overflow, and let it grow again."""
    want, scales = train_with_scaler(None)
    assert scales[0] < 2.0**127
    assert scales[-1] > min(scales)
    offloader = everything()
    got, same_scales = train_with_scaler(offloader)
    assert equal(got, want)
    assert scales == same_scales
    assert offloader.stats.bytes_moved > 0


def test_a_compiled_module() -> None:
    """Offload the tensors that a compiled region saves; gradients are close, since operations are fused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh())
    x = batches(1)[0]
    model(x).square().sum().backward()
    want = [parameter.grad.clone() for parameter in model.parameters()]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    offloader = everything(AdversarialCopier("late"))
    for _ in range(3):
        model.zero_grad()
        with offloader.offload_context(model):
            loss = compiled(x).square().sum()
        assert offloader.stats.host_bytes_live >= 4 * 32 * 4
        loss.backward()
        for parameter, expected in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-6)
        del loss
    assert offloader.stats.host_bytes_live == 0
