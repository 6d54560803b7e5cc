"""Steps that differ from run to run: the control names them, and says what to do."""

import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from exact_steps import Training, batches, tiny_net
from torch import Tensor

from hf_memopt.exactness import VerifyReport, verify


def refused(step: Callable[[], Any]) -> VerifyReport:
    report = verify(step, step)
    assert report.verdict == "not repeatable", report
    assert not report.equal
    assert report.words == "not repeatable"
    assert report.first is not None
    assert report.headline == f"not repeatable: two plain runs differ, first in {report.first.place}"
    assert [run.name for run in report.runs] == ["plain", "switched", "plain again"]
    return report


def test_a_generator_that_no_seed_reaches() -> None:
    model, generator = tiny_net(), torch.Generator().manual_seed(0)

    def step() -> None:
        noise = torch.randn(1, generator=generator)
        (model(batches()[0]) + noise).square().mean().backward()
        model.zero_grad()

    report = refused(step)
    assert str(report.first and report.first.place) == "loss of micro-batch 1 of step 1"
    assert "set the seed of each generator (torch, numpy, random, and those that the program makes)" in report.advice


def test_batches_that_go_on() -> None:
    model, data = tiny_net(), itertools.cycle(batches()[:3])

    def step() -> None:
        model(next(data)).square().mean().backward()
        model.zero_grad()

    report = refused(step)
    assert str(report.first and report.first.place) == "input [0] of micro-batch 1 of step 1"
    assert "begin each run at the first batch" in report.advice


def test_a_schedule_that_goes_on() -> None:
    training = Training()
    schedule = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 0.5**step)

    def step() -> None:
        training()
        schedule.step()

    report = refused(step)
    assert str(report.first and report.first.place) == "lr of 0.weight in step 2"
    assert "a schedule of learning rates" in report.advice


def test_an_operation_without_a_deterministic_kernel() -> None:
    model, numbers = tiny_net(), itertools.count()

    def step() -> None:
        warnings.warn(
            "put_ does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True, "
            "warn_only=True)'.",
            stacklevel=1,
        )
        (model(batches()[0]) + next(numbers)).sum().square().backward()
        model.zero_grad()

    with pytest.warns(UserWarning, match="put_ does not have"):
        report = refused(step)
    assert report.advice.startswith("torch has no deterministic kernel here for put_: replace")


def puts(x: Tensor) -> Tensor:
    """Return x after an operation of which torch says on every device that it may not be deterministic."""
    return x.detach().clone().put_(torch.tensor([0]), torch.tensor([1.0])) + x


@pytest.mark.parametrize("action", ["once", "ignore", "error"])
def test_torchs_own_warning_is_noted_and_ends_nothing(action: Any) -> None:
    model, numbers = tiny_net(), itertools.count()

    def step() -> None:
        (puts(model(batches()[0])) + next(numbers)).sum().square().backward()
        model.zero_grad()

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        report = refused(step)
    assert "put_" in report.advice
    assert any("put_" in str(each.message) for each in shown)


def test_the_generators_of_torch_numpy_and_python_begin_anew() -> None:
    model = tiny_net()

    def step() -> None:
        noise = torch.rand(1) + random.random() + np.random.rand()
        (model(batches()[0]) * noise).sum().backward()
        model.zero_grad()

    assert verify(step, step).equal


def test_a_step_without_backward_and_results_is_refused() -> None:
    with pytest.raises(ValueError, match=r"plain\(\) ran nothing backward and returned no tensors"):
        verify(lambda: None, lambda: None)
    with pytest.raises(ValueError, match=r"switched\(\) ran nothing backward"):
        verify(Training(), lambda: 3.0)


@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps_are_refused(steps: int) -> None:
    with pytest.raises(ValueError, match=f"steps={steps} must be at least 1"):
        verify(Training(), Training(), steps=steps)
