"""Differences that have the size of rounding, and faults beside which rounding is large."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_steps import WIDTH, Training, batches, tiny_net
from torch import Tensor, nn
from torch.nn import functional as F

from hf_memopt.exactness import verify

CLASSES, TOKENS = 64, 128


def in_halves(model: Any, x: Tensor) -> Tensor:
    hidden, weight = model[1](model[0](x)), model[3].weight
    return F.linear(hidden[:, :16], weight[:, :16]) + F.linear(hidden[:, 16:], weight[:, 16:], model[3].bias)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_sums_in_another_order(autocast: bool) -> None:
    class InHalves(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return in_halves(self, x)

    model = tiny_net(dropout=0.0)
    switched = InHalves(*model)
    # SGD follows the size of gradients. Adam turns the rounding of a gradient near zero into a whole update.
    trainings = [Training(each, autocast=autocast) for each in (model, switched)]
    for training in trainings:
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    report = verify(*trainings)
    assert report.verdict == "rounding", report
    assert not report.equal
    assert report.headline.startswith("equal but for rounding, first in ")
    assert "nothing, if rounding is allowed" in report.advice
    assert report.first is not None
    assert report.worst is not None
    assert report.first.of_yardstick is not None
    assert report.worst.of_yardstick is not None
    assert report.worst.excess <= 0.6
    more = ["plain, in float32", "switched, in float32"] if autocast else ["plain, rounded once"]
    assert [run.name for run in report.runs] == ["plain", "switched", "plain again", *more]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("change", [lambda x: x * 1.01, lambda x: x.bfloat16().float()], ids=["factor", "rounding"])
def test_a_faulty_update_by_sgd_among_sums_in_another_order(change: Callable[[Tensor], Tensor], autocast: bool) -> None:
    model = tiny_net(dropout=0.0)
    trainings = [Training(model, autocast=autocast), Training(model, call=in_halves, autocast=autocast)]
    for training in trainings:
        training.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    optimizer = trainings[1].optimizer
    weight, update = model[0].weight, optimizer.step

    def faulty() -> None:
        weight.grad = change(weight.grad)
        update()

    optimizer.step = faulty  # type: ignore[method-assign, assignment]
    report = verify(*trainings)
    assert report.verdict == "different", report


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor, chunks: int, ignored: int = 0) -> Tensor:
        hidden = self.hidden(x)
        losses = [
            F.cross_entropy(self.out(part), targets, reduction="sum")
            for part, targets in zip(hidden.chunk(chunks), labels.chunk(chunks), strict=True)
        ]
        return torch.stack(losses[: chunks - ignored]).sum() / TOKENS


def loss_in_chunks(model: Head, chunks: int, ignored: int = 0) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    labels = torch.randint(0, CLASSES, (TOKENS,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(x, labels, chunks, ignored).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_a_loss_in_chunks_is_rounding_and_one_that_forgets_a_chunk_is_not() -> None:
    model = Head()
    assert verify(loss_in_chunks(model, 1), loss_in_chunks(model, 4)).verdict == "rounding"
    report = verify(loss_in_chunks(model, 1), loss_in_chunks(model, 4, ignored=1))
    assert report.verdict == "different"
    assert report.first is not None
    assert report.first.place.phase == "loss"


def test_another_precision_is_no_rounding() -> None:
    model = tiny_net(dropout=0.0)
    report = verify(Training(model), Training(model, autocast=True))
    assert report.verdict == "different"
    assert "lower precision" in report.advice


def test_another_kernel_of_the_optimizer_is_rounding() -> None:
    model = tiny_net(dropout=0.0)
    trainings = [Training(model), Training(model)]
    trainings[0].optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    trainings[1].optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    report = verify(*trainings)
    assert report.verdict in ("equal", "rounding")


def test_batches_are_the_same_at_each_call() -> None:
    assert torch.equal(batches(), batches())
