"""A profiler's trace of a real GPU, in which copies run during compute."""

from collections.abc import Iterable

import pytest
import torch
from fake_cuda.device import is_loaded
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from hf_memopt import ActivationOffloader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(is_loaded(), reason="the fake GPU has no profiler"),
]

NUM_LAYERS, NUM_ROWS, WIDTH = 16, 8192, 4096  # each layer saves 128 MiB
MATRIX_PRODUCTS = 4  # of each layer, forward and again backward; they take longer than the layer's copy over any link
LEAST = 0.9

Interval = tuple[float, float]


class Work(torch.autograd.Function):
    """An operation that takes time in both directions, and saves only a weight."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return take_time(x, weight)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return take_time(gradient, weight), None


def take_time(x: Tensor, weight: Tensor) -> Tensor:
    result = x
    for _ in range(MATRIX_PRODUCTS):
        result = result @ weight
    return x + 0 * result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Work.apply(x, self.weight))  # tanh saves its result


def union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def common_length(first: list[Interval], second: list[Interval]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def test_the_lengths_of_intervals() -> None:
    first, second = union([(0, 2), (1, 3), (5, 6)]), union([(2, 5.5)])
    assert first == [(0, 3), (5, 6)]
    assert (length(first), common_length(first, second)) == (4, 1.5)


def test_nine_tenths_of_all_copies_run_beside_compute() -> None:
    model = nn.Sequential(*(Layer() for _ in range(NUM_LAYERS))).cuda()
    x = torch.randn(NUM_ROWS, WIDTH, device="cuda", requires_grad=True)
    offloader = ActivationOffloader(mode="all")

    def step() -> None:
        with offloader.offload_context(model):
            loss = model(x).sum()
        loss.backward()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    spans: dict[bool, list[Interval]] = {True: [], False: []}  # of copies, of kernels
    for event in trace.events():
        # The library's own labels span copies, but are not copies.
        if event.device_type == torch.autograd.DeviceBackend.CUDA and not event.is_user_annotation:
            spans["memcpy" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    copies, kernels = union(spans[True]), union(spans[False])
    moved = offloader.stats.bytes_moved
    assert moved > 0.8 * NUM_LAYERS * NUM_ROWS * WIDTH * 4
    assert length(copies) > 0
    assert common_length(copies, kernels) >= LEAST * length(copies)
