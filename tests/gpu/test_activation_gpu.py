"""Tests of ActivationOffloader on a GPU: order under slow copies and slow compute, memory, a host that never waits."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from fake_cuda.device import is_loaded
from host_waits import host_never_waits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memopt import ActivationOffloader
from hf_memopt.memory import SavedBytes
from hf_memopt.transfer import StreamCopier, Transfer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SLEEP_CYCLES = 40_000_000  # about 20 ms: far longer than any copy or kernel here
MODES = ["all", "inputs", "auto"]
WIDTH = 128 if is_loaded() else 512  # a fake GPU is as slow as a CPU
BUDGET_SHARE = 0.4
NUM_PASSES = 8  # enough for a plan to be made and followed

Gradients = list[Tensor]


class Block(nn.Module):
    """A layer that saves ten times its input, in tensors of at least 1 MiB, and computes gradients without atomics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.down = nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, num_blocks: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


class SleepyCopier(StreamCopier):
    """A copier whose streams sleep before each copy."""

    def to_host(self, source: Tensor, destination: Tensor) -> Transfer:
        with self._stream_to_host:
            torch.cuda._sleep(SLEEP_CYCLES)
        return super().to_host(source, destination)

    def to_device(self, source: Tensor, destination: Tensor) -> Transfer:
        with self._stream_to_device:
            torch.cuda._sleep(SLEEP_CYCLES)
        return super().to_device(source, destination)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Blocks().cuda()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2048, WIDTH, generator=torch.Generator().manual_seed(1)).cuda()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def gradients(model: nn.Module, x: Tensor, context: AbstractContextManager[Any] | None = None) -> Gradients:
    with context or nullcontext():
        loss = loss_of(model, x)
    # Overwrites any memory that the offloader has released.
    torch.full((2**24,), float("nan"), device="cuda")
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    with SavedBytes(exclude=model.parameters()) as saved:
        loss_of(model, x)
    return saved.total_bytes


def make_offloader(mode: str, model: nn.Module, x: Tensor, **options: Any) -> ActivationOffloader:
    """Return an offloader of a mode, and switch the model's checkpointing on for mode "inputs"."""
    model.checkpointing = mode == "inputs"
    if mode == "auto":
        options["budget_gib"] = BUDGET_SHARE * saved_bytes(model, x) / 2**30
    return ActivationOffloader(mode=mode, offload_threshold_mb=1, **options)


def equal(first: Gradients, second: Gradients) -> bool:
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_bitwise_the_plain_ones(model: nn.Module, x: Tensor, mode: str) -> None:
    want = gradients(model, x)
    offloader = make_offloader(mode, model, x)
    for _ in range(NUM_PASSES):
        assert equal(gradients(model, x, offloader.offload_context(model)), want)
    assert offloader.stats.bytes_moved > 0
    assert offloader.stats.host_bytes_live == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_pass_inside_of_a_backward_is_offloaded(model: nn.Module, x: Tensor, mode: str) -> None:
    """Run the model in a tensor's hook, which autograd calls in a thread of its own."""

    def cached(context: AbstractContextManager[Any]) -> Gradients:
        loss = torch.ones((), device="cuda", requires_grad=True)

        def replay(gradient: Tensor) -> None:
            with torch.enable_grad(), context:
                inner = loss_of(model, x)
            torch.full((2**24,), float("nan"), device="cuda")
            inner.backward(gradient)

        loss.register_hook(replay)
        (loss * 1).backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found

    offloader = make_offloader(mode, model, x)
    want = cached(nullcontext())
    for _ in range(NUM_PASSES):
        assert equal(cached(offloader.offload_context(model)), want)
    assert offloader.stats.bytes_moved > 0
    assert offloader.stats.host_bytes_live == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("prefetch_ahead", [0, 2])
def test_compute_waits_for_slow_copies(model: nn.Module, x: Tensor, mode: str, prefetch_ahead: int) -> None:
    want = gradients(model, x)
    offloader = make_offloader(mode, model, x, copier=SleepyCopier("cuda"), prefetch_ahead=prefetch_ahead)
    for _ in range(4):
        assert equal(gradients(model, x, offloader.offload_context(model)), want)
    torch.cuda.synchronize()
    # A plan may avoid so slow a link, and a fake GPU computes longer than copies sleep.
    if mode != "auto" and not is_loaded():
        assert offloader.stats.stall_ms > 10


@pytest.mark.parametrize("mode", MODES)
def test_copies_wait_for_slow_compute(model: nn.Module, x: Tensor, mode: str) -> None:
    want = gradients(model, x)
    offloader = make_offloader(mode, model, x)
    for _ in range(4):
        late = torch.full_like(x, float("nan"))
        torch.cuda._sleep(SLEEP_CYCLES)
        late.copy_(x)  # a copy that did not wait would still read NaN
        assert equal(gradients(model, late, offloader.offload_context(model)), want)


@pytest.mark.parametrize("mode", MODES)
def test_the_host_never_waits_in_steady_state(model: nn.Module, x: Tensor, mode: str) -> None:
    offloader = make_offloader(mode, model, x)
    for _ in range(NUM_PASSES):
        gradients(model, x, offloader.offload_context(model))
    with host_never_waits():
        gradients(model, x, offloader.offload_context(model))


def test_the_host_runs_ahead_of_slow_copies(model: nn.Module, x: Tensor) -> None:
    offloader = make_offloader("all", model, x, copier=SleepyCopier("cuda"))
    for _ in range(3):
        gradients(model, x, offloader.offload_context(model))
    torch.cuda.synchronize()
    with offloader.offload_context(model):
        loss = loss_of(model, x)
    finished = torch.cuda.current_stream().record_event()
    assert not finished.query()  # also covers waits that sync debug mode does not report
    loss.backward()


@pytest.mark.parametrize("mode", ["all", "inputs"])
def test_host_memory_is_allocated_in_the_first_two_steps_only(model: nn.Module, x: Tensor, mode: str) -> None:
    offloader = make_offloader(mode, model, x)
    counts = []
    for _ in range(NUM_PASSES):
        gradients(model, x, offloader.offload_context(model))
        counts.append(offloader.stats.num_host_allocations)
    assert counts[1] == counts[-1] > 0


def test_a_plan_that_is_followed_allocates_no_host_memory(model: nn.Module, x: Tensor) -> None:
    offloader = make_offloader("auto", model, x)
    for _ in range(NUM_PASSES):
        gradients(model, x, offloader.offload_context(model))
    count = offloader.stats.num_host_allocations
    for _ in range(3):
        gradients(model, x, offloader.offload_context(model))
    assert offloader.stats.num_host_allocations == count


def peak_bytes(model: nn.Module, x: Tensor, make_context: Callable[[], AbstractContextManager[Any]]) -> int:
    """Return the peak of one pass over the bytes that were allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with make_context():
        loss = loss_of(model, x)
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    model.zero_grad()
    return peak


@pytest.mark.parametrize("mode", ["all", "auto"])
def test_the_peak_falls_and_memory_returns(model: nn.Module, x: Tensor, mode: str) -> None:
    gradients(model, x)  # gives the libraries their workspaces
    plain = peak_bytes(model, x, nullcontext)
    saved = saved_bytes(model, x)
    offloader = make_offloader(mode, model, x)
    for _ in range(NUM_PASSES):
        gradients(model, x, offloader.offload_context(model))
    before = torch.cuda.memory_allocated()
    peak = peak_bytes(model, x, lambda: offloader.offload_context(model))
    # Both peaks include the same gradients and temporaries; they differ in the tensors that autograd saves.
    assert peak < plain - 0.4 * saved
    assert torch.cuda.memory_allocated() == before
    if mode == "auto":
        assert offloader.stats.measured_peak_gib <= 1.03 * BUDGET_SHARE * saved / 2**30


@pytest.mark.parametrize("mode", MODES)
def test_a_dropped_graph_gives_everything_back(model: nn.Module, x: Tensor, mode: str) -> None:
    offloader = make_offloader(mode, model, x)
    for _ in range(NUM_PASSES):
        gradients(model, x, offloader.offload_context(model))
    before = torch.cuda.memory_allocated()
    with offloader.offload_context(model):
        loss = loss_of(model, x)
    del loss
    assert torch.cuda.memory_allocated() == before
    assert offloader.stats.host_bytes_live == 0


def test_what_is_dropped_under_slow_copies_harms_nobody(model: nn.Module, x: Tensor) -> None:
    """Check for a device error, which would stay for the process, after host memory was dropped during a copy."""
    want = gradients(model, x)
    for has_backward in (False, True):
        offloader = make_offloader("all", model, x, copier=SleepyCopier("cuda"))
        with offloader.offload_context(model):
            loss = loss_of(model, x)
        if has_backward:
            loss.backward()
        model.zero_grad()
        del loss, offloader
        gc.collect()
    torch.cuda.synchronize()
    assert equal(gradients(model, x), want)
