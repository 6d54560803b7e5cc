"""Faults that switches have had in other projects: `verify` finds each, where it begins, and says which one it is."""

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from exact_steps import WIDTH, Training, batches, only_at, tiny_net
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_memopt.exactness import verify

hooks = torch.autograd.graph.saved_tensors_hooks


def halved(model: nn.Module, x: Tensor) -> Tensor:
    """Return the model's output, whose gradient comes back as half of it."""
    output: Tensor = model(x)
    output.register_hook(lambda gradient: gradient / 2)
    return output


def halved_once(step: int, micro_batch: int) -> Callable[[nn.Module, Tensor], Tensor]:
    broken = batches()[2 * (step - 1) + micro_batch - 1]
    return lambda model, x: halved(model, x) if torch.equal(x, broken) else model(x)


def without_a_gradient(model: Any, x: Tensor) -> Tensor:
    hidden = F.linear(x, model[0].weight.detach(), model[0].bias)
    output: Tensor = model[3](model[2](model[1](hidden)))
    return output


def drawn_again(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)


class Stale:
    """Gives backward the tensors that the micro-batch before saved."""

    def __init__(self) -> None:
        self._saved: list[list[Tensor]] = []

    def __call__(self, step: int, micro_batch: int) -> hooks:
        saved: list[Tensor] = []
        self._saved.append(saved)
        before = self._saved[-2] if (step, micro_batch) == (1, 2) else saved

        def pack(tensor: Tensor) -> int:
            saved.append(tensor)
            return len(saved) - 1

        return hooks(pack, lambda position: before[position])


def with_nan(tensor: Tensor) -> Tensor:
    damaged = tensor.detach().clone()
    if damaged.is_floating_point():
        damaged[(0,) * damaged.ndim] = math.nan
    return damaged


def other_strides(tensor: Tensor) -> Tensor:
    """Return the bytes of a transposed tensor as if they were in order."""
    return tensor if tensor.is_contiguous() else tensor.t().contiguous().view(tensor.shape)


SECOND = "micro-batch 2 of step 1"
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "halved": ({"call": halved}, "gradient of 3.bias after backward of micro-batch 1 of step 1", "the gradient is 0.5"),
    "halved in the second micro-batch": (
        {"call": halved_once(1, 2)},
        f"gradient of 3.bias after backward of {SECOND}",
        "this micro-batch's share of the gradient is 0.5 times the plain one",
    ),
    "halved in the second step": (
        {"call": halved_once(2, 1)},
        "gradient of 3.bias after backward of micro-batch 1 of step 2",
        "the gradient is 0.5 times",
    ),
    "one gradient missing": (
        {"call": without_a_gradient},
        "gradient of 0.weight after backward of micro-batch 1 of step 1",
        "only one run has this tensor: the plain one",
    ),
    "dropout drawn again": (
        {"call": drawn_again},
        "gradient of 3.weight after backward of micro-batch 1 of step 1",
        "masks were drawn again",
    ),
    "stale copy": ({"around": Stale()}, f"gradient of 3.bias after backward of {SECOND}", "a stale copy"),
    "not a number": (
        {"around": only_at(1, 2, partial(hooks, with_nan, lambda tensor: tensor))},
        f"gradient of 3.bias after backward of {SECOND}",
        "infinite or no numbers in the switched run alone",
    ),
    "wrong strides": (
        {"around": only_at(1, 2, partial(hooks, other_strides, lambda tensor: tensor))},
        f"gradient of 0.bias after backward of {SECOND}",
        "tensors that came back wrong",
    ),
    "first update skipped": ({"updated": (2,)}, "0.weight after step 1", "the update was skipped"),
    "second update skipped": ({"updated": (1,)}, "0.weight after step 2", "the update was skipped"),
    "all updates skipped": ({"updated": ()}, "0.weight after step 1", "the update was skipped"),
    "learning rate": ({"learning_rate": 1.01e-2}, "lr of 0.weight in step 1", "lr is 0.0101 instead of 0.01"),
    "order of data": ({"order": (0, 1, 3, 2)}, "input [0] of micro-batch 1 of step 2", "the runs see different data"),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sweep(share=0.15)
def test_a_fault_is_found_and_named(fault: str, autocast: bool) -> None:
    settings, place, advice = FAULTS[fault]
    model = tiny_net()
    report = verify(Training(model, autocast=autocast), Training(model, autocast=autocast, **settings))
    assert report.verdict == "different", report
    assert report.first is not None
    assert str(report.first.place) == place
    assert advice in report.advice
    assert report.losses_equal is (report.first.place.phase != "input")
    assert place in report.headline


def test_a_skipped_update_is_found_though_nothing_follows_it() -> None:
    model = tiny_net()
    report = verify(Training(model, steps=1), Training(model, updated=(), steps=1), steps=1)
    assert report.verdict == "different"
    assert "the update was skipped" in report.advice


def test_a_skipped_update_that_is_smaller_than_rounding_is_found() -> None:
    model = tiny_net()
    report = verify(Training(model, learning_rate=1e-7), Training(model, learning_rate=1e-7, updated=(2,)))
    assert report.first is not None
    assert report.first.roundings < 10
    assert report.verdict == "different"
    assert "the update was skipped" in report.advice


def test_a_model_that_begins_elsewhere() -> None:
    report = verify(Training(tiny_net()), Training(tiny_net(seed=1)))
    assert report.first is not None
    assert str(report.first.place) == "0.weight before the first step"
    assert "begin with different weights" in report.advice


def test_a_rounding_of_the_start_is_no_rounding() -> None:
    other = tiny_net()
    with torch.no_grad():
        other[0].weight.mul_(1 + 2**-23)
    assert verify(Training(tiny_net()), Training(other)).verdict == "different"


@pytest.mark.parametrize("with_updates", [True, False])
def test_statistics_that_recomputation_updates_twice(with_updates: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Linear(32, WIDTH))
    updated = (1, 2) if with_updates else ()
    switched = Training(model, lambda model, x: checkpoint(model, x, use_reentrant=False), updated=updated)
    report = verify(Training(model, updated=updated), switched)
    assert report.first is not None
    assert str(report.first.place) == "1.running_mean after step 1"
    assert "statistics that the switch updates once more" in report.advice
    assert "gradient" not in report.differing


def test_one_wrong_element_of_a_large_gradient() -> None:
    plain = nn.Linear(1024, 1024)
    switched = copy.deepcopy(plain)

    def damage(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[700, 30] *= 2
        return gradient

    switched.weight.register_hook(damage)
    x = torch.randn(8, 1024, generator=torch.Generator().manual_seed(0))
    report = verify(*((lambda model=model: model(x).square().mean().backward()) for model in (plain, switched)))
    assert report.verdict == "different"
    assert report.first is not None
    assert str(report.first.place).startswith("gradient of weight after backward of micro-batch 1")


def test_a_switched_step_that_runs_nothing_backward() -> None:
    model, x = tiny_net(), batches()[0]

    def step(backward: bool) -> Tensor:
        loss: Tensor = model(x).square().mean()
        if backward:
            loss.backward()
        model.zero_grad()
        return loss

    report = verify(lambda: step(True), lambda: step(False))
    assert report.verdict == "different"
    assert report.first is not None
    assert report.first.place.phase == "gradient"


def test_double_precision_is_judged_by_its_own_rounding() -> None:
    model = tiny_net(dropout=0.0).double()
    x = batches()[0].double()

    def step(factor: float) -> None:
        output = model(x)
        output.register_hook(lambda gradient: gradient * factor)
        output.square().mean().backward()
        model.zero_grad()

    assert verify(lambda: step(1), lambda: step(1 + 1e-7)).verdict == "different"
    assert verify(lambda: step(1), lambda: step(1 + 4e-16)).verdict == "rounding"


def test_a_factor_of_half_a_percent_under_autocast_is_no_rounding() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), batches()[0]

    def step(factor: float) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        output.float().mul(factor).square().mean().backward()
        model.zero_grad()

    assert verify(lambda: step(1), lambda: step(1 + 2**-8)).verdict == "different"


@pytest.mark.parametrize(
    ("keeps", "factor", "advice"),
    [
        (True, 1.0, "the gradient of the step before is still there: it was not set to zero"),
        (False, 1.01, "the optimizer got 1.01 times the plain gradient"),
        (False, 0.0, "the update was skipped"),
    ],
)
def test_what_happens_to_a_gradient_around_an_update_is_named(keeps: bool, factor: float, advice: str) -> None:
    def training(keeps: bool, factor: float) -> Callable[[], None]:
        model, calls = tiny_net(dropout=0.0), itertools.count()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step() -> None:
            model(batches()[next(calls) % 2]).square().mean().backward()
            model[0].weight.grad.mul_(factor)
            optimizer.step()
            if not keeps:
                optimizer.zero_grad()

        return step

    report = verify(training(False, 1.0), training(keeps, factor))
    assert report.verdict == "different"
    assert advice in report.advice
