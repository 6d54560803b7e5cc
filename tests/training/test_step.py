"""Tests of train_step: the gradient of all micro-batches together, and a clean state after an error."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from gradients import gradients_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_memopt.memory import DeviceMemory
from hf_memopt.training import NonFiniteGradientError, step, train_step

TOLERANCE = 1e-12  # fp64; sums over samples are taken in another order


class Run:
    """A run that keeps the gradients that its steps gave the optimizer."""

    def __init__(self, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **options)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.gradients: list[list[Tensor]] = []
        optimizer.register_step_pre_hook(lambda *event: self.gradients.append(gradients_of(model)))
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self, micro_batches: Any, loss_fn: Any = None, **options: Any) -> step.StepResult:
        return train_step(self.accelerator, self.model, loss_fn or mean_loss, micro_batches, self.optimizer, **options)

    def whole(self, batch: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return torch's own loss and gradient of one batch."""
        loss = mean_loss(self.model, batch)
        return loss.detach(), list(torch.autograd.grad(loss, list(self.model.parameters())))

    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def samples(num: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(num, 4, dtype=dtype, generator=torch.Generator().manual_seed(1))


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def failing(loss_fn: Callable[..., Tensor], at: int, error: BaseException) -> Callable[..., Tensor]:
    calls = itertools.count(1)

    def fail(model: nn.Module, batch: Tensor) -> Tensor:
        if next(calls) == at:
            raise error
        return loss_fn(model, batch)

    return fail


@pytest.mark.parametrize("sizes", [[8], [4] * 2, [2] * 4, [1] * 8, [3, 3, 2], [5, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_micro_batches_give_the_gradient_of_the_whole_batch(sizes: list[int], accumulation_steps: int) -> None:
    """Try several numbers of accumulation steps, by which Accelerate divides."""
    run = Run(gradient_accumulation_steps=accumulation_steps)
    loss, want = run.whole(samples())
    result = run.step(samples().split(sizes), weight_fn=len)
    assert largest_difference(run.gradients[0], want) <= TOLERANCE
    assert result.loss == pytest.approx(loss.item(), abs=TOLERANCE)
    assert result.num_micro_batches == len(sizes)
    assert result.grad_norm == pytest.approx(torch.cat([each.flatten() for each in want]).norm().item(), abs=TOLERANCE)
    assert (result.skipped, result.peak_bytes) == (False, None)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_any_split_and_any_weights_give_the_weighted_mean(lengths: list[int], data: st.DataObject) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    run = Run(gradient_accumulation_steps=data.draw(st.integers(1, 4)))
    parts = samples(sum(lengths)).split(lengths)
    weights = data.draw(st.lists(st.floats(0.1, 1e4), min_size=len(parts), max_size=len(parts)))
    remaining = iter(weights)
    losses, gradients = zip(*(run.whole(part) for part in parts), strict=True)
    run_result = run.step(parts, weight_fn=lambda part: next(remaining))
    want = [
        sum(w * each for w, each in zip(weights, of_parameter, strict=True)) / sum(weights)
        for of_parameter in zip(*gradients, strict=True)
    ]
    assert largest_difference(run.gradients[0], want) <= TOLERANCE
    expected_loss = sum(w * loss.item() for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert run_result.loss == pytest.approx(expected_loss, rel=TOLERANCE)


def test_the_tail_window_divides_by_its_own_count_where_accelerate_does_not() -> None:
    tail = samples(3).split(1)
    run = Run(gradient_accumulation_steps=4)
    _, want = run.whole(samples(3))
    run.step(tail)
    assert largest_difference(run.gradients[0], want) <= TOLERANCE
    for part in tail:  # Accelerate alone gives three quarters of it
        run.accelerator.backward(mean_loss(run.model, part))
    run.model.zero_grad()
    before = run.whole(samples(3))[1]
    for part in tail:
        run.accelerator.backward(mean_loss(run.model, part))
    assert largest_difference(gradients_of(run.model), [0.75 * each for each in before]) <= TOLERANCE


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_it_is_bitwise_the_plain_accelerate_loop_where_that_one_is_right(mixed_precision: str) -> None:
    """Compare for equal micro-batches, a full window, and a power of two as the divisor."""
    run = Run(torch.float32, gradient_accumulation_steps=4, mixed_precision=mixed_precision)
    batches = samples(dtype=torch.float32).split(2)
    for batch in batches:
        run.accelerator.backward(mean_loss(run.model, batch))
    want = gradients_of(run.model)
    run.step(batches)
    assert equal(run.gradients[0], want)


def test_clipping_is_once_for_the_whole_step() -> None:
    run = Run()
    _, want = run.whole(samples())
    norm = torch.cat([each.flatten() for each in want]).norm().item()
    result = run.step(samples().split(2), max_grad_norm=norm / 2)
    assert largest_difference(run.gradients[0], [each / 2 for each in want]) < 1e-5  # torch adds 1e-6 to the norm
    assert result.grad_norm == pytest.approx(norm)


def test_what_weighs_nothing_is_left_out() -> None:
    """Take a micro-batch of weight zero whose loss is NaN, as a mean over no tokens is."""

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return mean_loss(model, batch) * (float("nan") if batch[0, 0] == 0 else 1)

    run = Run()
    empty = torch.zeros(2, 4, dtype=torch.float64)
    _, want = run.whole(samples())
    parts = [empty, *samples().split(4), empty]
    result = run.step(parts, loss_fn, weight_fn=lambda part: part.count_nonzero())
    assert largest_difference(run.gradients[0], want) <= TOLERANCE
    assert result.num_micro_batches == 2
    with pytest.raises(ValueError, match="all weights are 0"):
        run.step([empty], loss_fn, weight_fn=lambda part: part.count_nonzero())


@pytest.mark.parametrize("error", [RuntimeError("injected"), KeyboardInterrupt(), torch.OutOfMemoryError("injected")])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_exception_leaves_no_trace(at: int, error: BaseException) -> None:
    run = Run()
    before = run.parameters()
    with pytest.raises(type(error)) as caught:
        run.step(samples().split(2), failing(mean_loss, at, error))
    assert caught.value is error
    assert equal(run.parameters(), before)
    assert all(parameter.grad is None and not parameter._backward_hooks for parameter in run.model.parameters())
    assert run.accelerator.step == 0
    _, want = run.whole(samples())
    run.step(samples().split(2))
    assert largest_difference(run.gradients[0], want) <= TOLERANCE


def test_left_over_gradients_are_dropped() -> None:
    run = Run()
    _, want = run.whole(samples())
    mean_loss(run.model, 2 * samples()).backward()
    run.step(samples().split(4))
    assert largest_difference(run.gradients[0], want) <= TOLERANCE


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_is_named_and_not_applied(value: float, max_grad_norm: float | None) -> None:
    run = Run()
    run.step(samples().split(2))
    before = run.parameters()

    def poisoned(model: nn.Module, batch: Tensor) -> Tensor:
        loss = mean_loss(model, batch)
        return loss * value if torch.equal(batch, samples()[4:6]) else loss

    with pytest.raises(NonFiniteGradientError, match=r"step 2\..*\n  rank 0, micro-batch 3: ") as caught:
        run.step(samples().split(2), poisoned, max_grad_norm=max_grad_norm)
    assert caught.value.step == 2
    ((number, names),) = caught.value.findings[0]
    assert (number, sorted(names)) == (3, ["0.bias", "0.weight", "2.bias", "2.weight"])
    assert equal(run.parameters(), before)
    run.step(samples().split(2))
    assert run.accelerator.step == 2


def test_the_scheduler_steps_with_the_optimizer() -> None:
    run = Run()
    scheduler = run.accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(run.optimizer.optimizer, 0.5))
    for _ in range(3):
        run.step([samples()], scheduler=scheduler)
    assert scheduler.get_last_lr() == [0.1 / 8]


class ScaledRun(Run):
    """A run in fp16 with a loss scaler for the CPU."""

    def __init__(self, init_scale: float) -> None:
        accelerator = Accelerator(cpu=True)
        accelerator.state._mixed_precision = "fp16"  # set directly, since Accelerate refuses fp16 without a GPU
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=1000)
        self.accelerator = accelerator
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.gradients = []
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.register_step_pre_hook(lambda *event: self.gradients.append(gradients_of(model)))
        self.model, self.optimizer = accelerator.prepare(model, optimizer)


def test_an_overflow_that_the_loss_scaler_finds_is_a_skipped_step() -> None:
    """Skip steps until the smallest scale, where the error names the gradient."""
    run = ScaledRun(init_scale=4.0)
    batches = samples(dtype=torch.float32).split(4)
    result = run.step(batches, scheduler=run.scheduler, max_grad_norm=1.0)
    assert not result.skipped
    before = run.parameters()

    def overflowing(model: nn.Module, batch: Tensor) -> Tensor:
        return mean_loss(model, batch) * float("inf")

    for scale in (2.0, 1.0):
        result = run.step(batches, overflowing, scheduler=run.scheduler)
        assert result.skipped
        assert run.accelerator.scaler.get_scale() == scale
    assert run.scheduler.get_last_lr() == [0.05]
    with pytest.raises(NonFiniteGradientError, match="step 4"):
        run.step(batches, overflowing)
    assert equal(run.parameters(), before)


def test_a_scaled_gradient_is_the_plain_one() -> None:
    """Compare up to autocast's rounding in fp16; a scale that is a power of two rounds nothing."""
    run = ScaledRun(init_scale=2.0**10)
    batches = samples(dtype=torch.float32).split(4)
    for batch in batches:
        (mean_loss(run.model, batch) / 2).backward()
    want = gradients_of(run.model)
    result = run.step(batches)
    assert largest_difference(run.gradients[0], want) < 1e-3
    assert result.grad_norm == pytest.approx(torch.cat([each.flatten() for each in want]).norm().item(), rel=1e-3)


def test_peak_bytes_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def read(self) -> DeviceMemory:
            return DeviceMemory(1, 12345, 3)

    monkeypatch.setattr(step, "_counters", lambda device: Fake())
    assert Run().step([samples()]).peak_bytes == 12345


def test_steps_are_counted_and_saved(tmp_path: Path) -> None:
    run = Run()
    for _ in range(3):
        run.step([samples()])
    run.accelerator.save_state(str(tmp_path))
    run.accelerator.step = 0
    run.accelerator.load_state(str(tmp_path))
    with pytest.raises(NonFiniteGradientError, match="step 4"):
        run.step([samples() * float("nan")])


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_bad_weights_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=f"weight_fn returned {weight} for micro-batch 1"):
        Run().step([samples()], weight_fn=lambda batch: weight)


def test_what_would_go_wrong_is_refused() -> None:
    run = Run(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="micro_batches is empty"):
        run.step([])
    with pytest.raises(ValueError, match="max_grad_norm=0 must be above 0; None does not clip"):
        run.step([samples()], max_grad_norm=0)
    with pytest.raises(ValueError, match="optimizer=SGD was not prepared"):
        train_step(run.accelerator, run.model, mean_loss, [samples()], run.optimizer.optimizer)  # type: ignore[arg-type]
    with run.accelerator.accumulate(run.model), pytest.raises(ValueError, match="sync_gradients=False"):
        run.step([samples()])
    run.accelerator.sync_gradients = True  # as the message says
    run.step([samples()])
    run.accelerator.state.distributed_type = DistributedType.DEEPSPEED
    run.accelerator.deepspeed_engine_wrapped = None  # as in an accelerator that has prepared no model
    with pytest.raises(ValueError, match="the accelerator uses DeepSpeed and has prepared no model"):
        run.step([samples()])
