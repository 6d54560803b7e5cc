import random

import torch
from torch import nn

from hf_memopt.training.repeatable import BufferState, RandomState


def test_the_same_numbers_are_drawn_again() -> None:
    def draw() -> tuple[float, float]:
        return random.random(), torch.rand(()).item()

    state = RandomState(torch.device("cpu"))
    first = draw()
    assert draw() != first
    state.restore()
    assert draw() == first


def test_buffers_are_put_back_and_parameters_stay() -> None:
    model = nn.BatchNorm1d(3)
    state = BufferState(model)
    before = model.running_mean.clone()
    model(torch.randn(5, 3) + 1)
    assert not torch.equal(model.running_mean, before)
    with torch.no_grad():
        model.weight.fill_(7.0)
    state.restore()
    assert torch.equal(model.running_mean, before)
    assert torch.equal(model.weight, torch.full((3,), 7.0))
