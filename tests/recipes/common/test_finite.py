from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from late_imports import LateModule
from torch import Tensor, nn

from hf_memopt.training import NonFiniteGradientError

finite = LateModule("hf_memopt.training.finite_check")

pytestmark = pytest.mark.usefixtures("on_the_cpu")

NAN, INF = float("nan"), float("inf")


class Window:
    """Updates of a small model by the gradients of two micro-batches, as a recipe makes them."""

    def __init__(self, scaler: Any = None) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer.scaler = scaler
        self.num_updates = 0
        number = lambda: self.num_updates + 1  # noqa: E731
        self.check = finite.FiniteCheck(self.accelerator, self.model, self.optimizer, number)

    def update(self, *losses: Callable[[Tensor], Tensor]) -> None:
        for loss_of in losses:
            loss = loss_of(self.model(torch.ones(2, 3)))
            loss.backward()
            self.check.end_micro_batch(loss)
        self.check.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_updates += 1

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def good(output: Tensor) -> Tensor:
    return output.square().mean()


def infinite_without_gradient(output: Tensor) -> Tensor:
    return output.mean() + INF


def nan(output: Tensor) -> Tensor:
    return output.mean() * NAN


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full((2, 1), INF)


def huge(output: Tensor) -> Tensor:
    return output.mean() * 3e38


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ((good, nan), r"Non-finite loss at step 3\. .*\n  rank 0, micro-batch 2: loss, (1\.bias|1\.weight), "),
        ((infinite_without_gradient, good), r"Non-finite loss at step 3\. .*\n  rank 0, micro-batch 1: loss$"),
        ((good, _InfiniteGradient.apply), r"Non-finite gradient at step 3\. .*\n  rank 0, micro-batch 2: 1\."),
        ((huge, huge), r"Non-finite gradient at step 3\. .*\n .* their sum over micro-batches and ranks overflowed"),
    ],
)
def test_the_first_bad_update_is_not_made(losses: tuple[Any, ...], message: str) -> None:
    window = Window()
    window.update(good, good)
    window.update(good, good)
    before = window.weights()
    with pytest.raises(NonFiniteGradientError, match=message):
        window.update(*losses)
    assert all(map(torch.equal, before, window.weights()))


def test_good_updates_are_those_of_a_plain_loop() -> None:
    window, plain = Window(), Window()
    for _ in range(3):
        window.update(good, good)
        (good(plain.model(torch.ones(2, 3)))).backward()
        (good(plain.model(torch.ones(2, 3)))).backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    assert all(map(torch.equal, window.weights(), plain.weights()))


def test_a_loss_scaler_takes_care_of_gradients_and_not_of_losses() -> None:
    window = Window(SimpleNamespace(is_enabled=lambda: True, get_scale=lambda: 1024.0))
    window.update(good, _InfiniteGradient.apply)
    with pytest.raises(NonFiniteGradientError, match=r"Non-finite loss at step 2\. "):
        window.update(good, infinite_without_gradient)


def test_gradients_of_before_do_not_count() -> None:
    window = Window()
    _InfiniteGradient.apply(window.model(torch.ones(2, 3))).backward()
    window.optimizer.zero_grad()
    window.check.begin_update()
    window.update(good, good)
    assert window.num_updates == 1
