"""Tests of offloading on the caller's own streams, on several devices, and in processes that fork."""

import gc
import multiprocessing
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from random_plans import RandomPlanner
from torch import Tensor, nn

from hf_memopt import ActivationOffloader
from hf_memopt.transfer import StreamCopier

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, BATCH, NUM_BLOCKS = 64, 256, 6
SLEEP_CYCLES = 20_000_000  # some 10 ms
NUM_PASSES = 5  # of which mode "auto" records two

Gradients = list[Tensor]
Run = Callable[[nn.Module, Tensor, Any], Gradients]


@pytest.fixture(params=["all", "auto"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ActivationOffloader]:
    """A constructor of offloaders; in mode "auto" they follow random plans, which offload and recompute."""
    monkeypatch.setattr("hf_memopt.activations.plan_maker.make_plan", RandomPlanner(random.Random(1)))
    return lambda: ActivationOffloader(mode=request.param, offload_threshold_mb=0)


def blocks(device: str = "cuda") -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_BLOCKS)]
    return nn.Sequential(*layers).to(device)


def batch(seed: int, device: str = "cuda") -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


def taken(model: nn.Module) -> Gradients:
    """Wait for the gradients' streams first."""
    torch.cuda.synchronize()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def overwrite_free_memory(device: str = "cuda") -> None:
    """Fill released memory with NaN."""
    for num_numbers in (BATCH * WIDTH, 4 * BATCH * WIDTH):
        torch.full((num_numbers,), float("nan"), device=device)


def on_a_side_stream(model: nn.Module, x: Tensor, context: Any) -> Gradients:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        with context:
            loss = model(x).square().mean()
        overwrite_free_memory()
        loss.backward()
    return taken(model)


def backward_from_another_stream(model: nn.Module, x: Tensor, context: Any) -> Gradients:
    side = torch.cuda.Stream()
    with context:
        loss = model(x).square().mean()
    overwrite_free_memory()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss.backward()
    return taken(model)


def blocks_on_alternating_streams(model: nn.Module, x: Tensor, context: Any) -> Gradients:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    before = torch.cuda.current_stream()
    assert isinstance(model, nn.Sequential)
    with context:
        for index, block in enumerate(model):
            stream = streams[index % 2]
            stream.wait_stream(before)
            x.record_stream(stream)  # its memory belongs to another stream
            with torch.cuda.stream(stream):
                x = block(x)
            before = stream
        torch.cuda.current_stream().wait_stream(before)
        x.record_stream(torch.cuda.current_stream())
        loss = x.square().mean()
    overwrite_free_memory()
    loss.backward()
    return taken(model)


@pytest.mark.parametrize("run", [on_a_side_stream, backward_from_another_stream, blocks_on_alternating_streams])
def test_gradients_are_those_without_offloading(run: Run, make: Callable[[], ActivationOffloader]) -> None:
    model, x, offloader = blocks(), batch(0), make()
    want = run(model, x, nullcontext())
    for _ in range(NUM_PASSES):
        found = run(model, x, offloader.offload_context(model))
        assert all(map(torch.equal, found, want))
    assert offloader.stats.bytes_moved > 0


def test_two_models_train_side_by_side(make: Callable[[], ActivationOffloader]) -> None:
    """Interleave passes of two models, each on its own stream, with one offloader."""
    models, inputs = [blocks(), blocks()], [batch(0), batch(1)]
    wants = [on_a_side_stream(model, x, nullcontext()) for model, x in zip(models, inputs, strict=True)]
    streams, offloader = [torch.cuda.Stream(), torch.cuda.Stream()], make()
    for _ in range(NUM_PASSES):
        losses = []
        for model, x, stream in zip(models, inputs, streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream), offloader.offload_context(model):
                losses.append(model(x).square().mean())
        for loss, stream in zip(losses, streams, strict=True):
            with torch.cuda.stream(stream):
                loss.backward()
        for model, want in zip(models, wants, strict=True):
            assert all(map(torch.equal, taken(model), want))


def test_copies_of_one_stream_wait_for_slow_ones_of_another() -> None:
    first, second, copier = torch.cuda.Stream(), torch.cuda.Stream(), StreamCopier("cuda")
    ones, zeros = (torch.full((1024,), value, dtype=torch.uint8, device="cuda") for value in (1, 0))
    found, host = torch.zeros_like(ones), copier.empty_host(1024)
    host.zero_()

    def copy(slowly: Callable[[], object], at_once: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(SLEEP_CYCLES)
            slowly()
        with torch.cuda.stream(second):
            at_once()
        torch.cuda.synchronize()

    copy(lambda: copier.to_host(ones, host), lambda: copier.to_device(host, found))
    assert torch.equal(found, ones)
    found.zero_()
    copy(lambda: copier.to_device(host, found), lambda: copier.to_host(zeros, host))
    assert torch.equal(found, ones)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one(make: Callable[[], ActivationOffloader]) -> None:
    model, x, offloader = blocks("cuda:1"), batch(0, "cuda:1"), make()
    assert torch.cuda.current_device() == 0

    def gradients(context: Any) -> Gradients:
        with context:
            loss = model(x).square().mean()
        overwrite_free_memory("cuda:1")
        loss.backward()
        return taken(model)

    want = gradients(nullcontext())
    for _ in range(NUM_PASSES):
        assert all(map(torch.equal, gradients(offloader.offload_context(model)), want))
    assert offloader.stats.bytes_moved > 0


def test_half_precision_with_a_scaler(make: Callable[[], ActivationOffloader]) -> None:
    """Make the first of several updates overflow."""

    def train(offloader: ActivationOffloader | None) -> list[Tensor]:
        model, x = blocks(), batch(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
        for _ in range(NUM_PASSES):
            context = offloader.offload_context(model) if offloader else nullcontext()
            with context, torch.autocast("cuda", torch.float16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() < 2.0**40
        return [parameter.detach() for parameter in model.parameters()]

    assert all(map(torch.equal, train(make()), train(None)))


def test_a_fork_leaves_page_locked_memory_alone(make: Callable[[], ActivationOffloader]) -> None:
    """Fork as a DataLoader does: the child inherits blocks and copies under way."""
    model, x, offloader = blocks(), batch(0), make()
    want = on_a_side_stream(model, x, nullcontext())
    for _ in range(3):
        with offloader.offload_context(model):
            loss = model(x).square().mean()
        child = multiprocessing.get_context("fork").Process(target=gc.collect)
        child.start()
        child.join()
        assert child.exitcode == 0
        loss.backward()
        assert all(map(torch.equal, taken(model), want))
