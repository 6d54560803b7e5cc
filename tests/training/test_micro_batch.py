"""Tests that MicroBatcher and find_micro_batch count each sample once at any size that fits."""

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from gradients import equal, gradients_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_memopt.training import MicroBatcher, NonFiniteGradientError, find_micro_batch
from hf_memopt.training.micro_batch import is_out_of_memory


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("injected in backward")


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(hidden.detach().mean(0), 0.5)
        return hidden - self.mean


class Run:
    """A prepared model whose loss fails `where`, at calls `fail_at` (from 1) or above `largest` samples."""

    def __init__(self, *, fail_at: tuple[int, ...] = (), largest: int = 1000, where: str = "forward") -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        layers = nn.Linear(4, 8), RunningMean(), nn.Dropout(0.3), nn.Linear(8, 1)
        model = nn.Sequential(*layers).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.gradients: list[list[Tensor]] = []
        optimizer.register_step_pre_hook(lambda *event: self.gradients.append(gradients_of(model)))
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.sizes: list[int] = []
        self.seen: list[Tensor] = []
        self.fail_at, self.largest, self.where = fail_at, largest, where

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.sizes.append(len(batch))
        self.seen.append(batch)
        hidden = model(batch)
        if len(batch) > self.largest or len(self.sizes) in self.fail_at:
            if self.where == "forward":
                raise torch.OutOfMemoryError("injected in forward")
            hidden = Fail.apply(hidden)
        return (hidden - batch.sum(1, keepdim=True)).square().mean()

    def train(self, size: int, batches: list[Tensor]) -> MicroBatcher:
        batcher = MicroBatcher(self.accelerator, size)
        torch.manual_seed(1)
        for batch in batches:
            batcher.train_step(self.model, self.loss, batch, self.optimizer)
        return batcher

    def state(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.model.state_dict().values()]


def samples(num: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(num, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_a_step_that_runs_out_of_memory_is_as_if_it_had_begun_smaller(fail_at: int, where: str) -> None:
    """Compare bitwise, for a failure in each micro-batch."""
    batches = [samples(8, seed) for seed in range(3)]
    want = Run()
    want.train(1, batches)
    run = Run(fail_at=(fail_at,), where=where)
    batcher = run.train(2, batches)
    assert batcher.micro_batch_size == 1
    assert run.sizes == [2] * fail_at + [1] * 24
    assert equal(run.seen[fail_at:], want.seen)  # no sample lost, none repeated
    assert equal(run.state(), want.state())
    assert len(run.gradients) == 3


def test_in_a_later_step_the_earlier_ones_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Check that the size is halved once, kept afterwards, and logged once."""
    batches = [samples(7, seed) for seed in range(3)]
    run = Run(fail_at=(4,))
    with caplog.at_level(logging.WARNING):
        batcher = run.train(4, batches)
    assert run.sizes == [4, 3, 4, 3] + [2, 2, 2, 1] * 2
    assert batcher.micro_batch_size == 2
    (record,) = caplog.records
    assert "out of memory with micro-batches of 4 samples; from now on 2" in record.message


def test_halves_until_it_fits(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(largest=1)
    with caplog.at_level(logging.WARNING):
        run.train(7, [samples(7)])
    assert run.sizes == [7, 4, 2] + [1] * 7
    (record,) = caplog.records
    assert "micro-batches of 7 samples; from now on 1" in record.message


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_any_batch_in_any_micro_batches_gives_its_gradient(num: int, size: int, largest: int) -> None:
    run = Run(largest=largest)
    run.model.eval()
    batch = samples(num)
    want = torch.autograd.grad(
        (run.model(batch) - batch.sum(1, keepdim=True)).square().mean(), list(run.model.parameters())
    )
    run.train(size, [batch])
    for gradient, wanted in zip(run.gradients[0], want, strict=True):
        assert (gradient - wanted).abs().max() <= 1e-12  # fp64; summed in another order


def test_one_sample_that_does_not_fit_is_the_original_error() -> None:
    run = Run(largest=0)
    with pytest.raises(torch.OutOfMemoryError, match="injected in forward"):
        run.train(2, [samples()])
    assert equal([*run.model.parameters()], [*Run().model.parameters()])
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_other_errors_are_not_tried_again() -> None:
    run = Run()

    def broken(model: nn.Module, batch: Tensor) -> Tensor:
        run.sizes.append(len(batch))
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        MicroBatcher(run.accelerator, 4).train_step(run.model, broken, samples(), run.optimizer)
    assert run.sizes == [4]


def test_what_the_failed_forward_computed_is_gone_before_the_next_attempt() -> None:
    run = Run()
    computed: list[weakref.ref[Tensor]] = []
    alive = []
    gc.disable()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        alive.append(sum(each() is not None for each in computed))
        hidden = model(batch)
        computed.append(weakref.ref(hidden))
        if len(batch) > 2:
            raise torch.OutOfMemoryError("injected")
        return hidden.square().mean()

    try:
        MicroBatcher(run.accelerator, 8).train_step(run.model, loss, samples(), run.optimizer)
    finally:
        gc.enable()
    assert alive[:3] == [0, 0, 0]  # with 8, 4 and 2 samples


def test_a_gradient_that_is_not_finite_is_named_by_its_place_in_the_step_that_fits() -> None:
    batch = samples()
    batch[5] = float("nan")
    run = Run(fail_at=(2,))  # after a whole micro-batch
    with pytest.raises(NonFiniteGradientError, match="rank 0, micro-batch 3: ") as caught:
        run.train(4, [batch])
    assert [number for number, _ in caught.value.findings[0]] == [3, 4]  # since the running mean stays NaN


def test_token_weights_stay_exact() -> None:
    run = Run(largest=2)
    run.model.eval()
    batch = samples(5)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        run.loss(model, batch["x"])
        return (model(batch["x"]).squeeze(1).square() * batch["tokens"]).sum() / batch["tokens"].sum()

    whole = (run.model(batch).squeeze(1).square() * weights).sum() / weights.sum()
    want = torch.autograd.grad(whole, list(run.model.parameters()))
    MicroBatcher(run.accelerator, 5).train_step(
        run.model,
        loss,
        {"x": batch, "tokens": weights},
        run.optimizer,
        weight_fn=lambda part: part["tokens"].sum(),
    )
    for gradient, wanted in zip(run.gradients[0], want, strict=True):
        assert (gradient - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize(("largest", "found"), [(1000, 12), (11, 6), (5, 3), (2, 2), (1, 1)])
def test_finds_the_largest_micro_batch_that_fits(largest: int, found: int) -> None:
    """Search with fewer samples than the effective batch, and check that no state changes."""
    run = Run(largest=largest)
    run.train(1, [samples()])
    before, random = run.state(), torch.get_rng_state()
    assert find_micro_batch(run.accelerator, run.model, run.loss, samples(5), effective_batch=12) == found
    assert equal(run.state(), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_the_search_tries_a_second_micro_batch_with_gradients_in_place() -> None:
    run = Run(largest=4)
    find_micro_batch(run.accelerator, run.model, run.loss, samples(), effective_batch=8)
    assert run.sizes == [8, 4, 4]
    with pytest.raises(torch.OutOfMemoryError):
        find_micro_batch(Run().accelerator, run.model, Run(largest=0).loss, samples(), effective_batch=2)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB.",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp",
        "MPS backend out of memory (MPS allocated: 1 GB)",
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    ],
)
def test_out_of_memory_is_recognised(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))


def test_other_errors_are_not_recognised() -> None:
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(torch.distributed.DistBackendError("NCCL error: out of memory"))
