"""A tiny model and training steps of it that can be switched, or broken at one place."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16
Call = Callable[[nn.Module, Tensor], Tensor]


def tiny_net(seed: int = 0, dropout: float = 0.2) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, WIDTH))


def batches() -> Tensor:
    """Return `(4, 8, WIDTH)`: two micro-batches for each of two steps."""
    return torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(1))


@dataclass
class Training:
    """A step of two micro-batches and an update at each call, with the same data at the first call of each run.

    Attributes:
        call: runs the model.
        around: context of the forward pass of each micro-batch, by step and micro-batch, from 1 on.
        order: of the batches.
        updated: steps that update the weights.
    """

    model: nn.Module = field(default_factory=tiny_net)
    call: Call = lambda model, x: model(x)
    around: Callable[[int, int], AbstractContextManager[Any]] = lambda step, micro_batch: nullcontext()
    order: Sequence[int] = (0, 1, 2, 3)
    learning_rate: float = 1e-2
    updated: Sequence[int] = (1, 2)
    autocast: bool = False
    steps: int = 2

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.learning_rate)
        self._calls = 0

    def __call__(self) -> None:
        step = self._calls % self.steps + 1
        self._calls += 1
        for micro_batch in (1, 2):
            x = batches()[self.order[2 * (step - 1) + micro_batch - 1]]
            with self.around(step, micro_batch), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = self.call(self.model, x).square().mean()
            loss.backward()
        if step in self.updated:
            self.optimizer.step()
        self.optimizer.zero_grad()


def only_at(step: int, micro_batch: int, make: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Return `around` that makes a context for one micro-batch alone."""
    return lambda *now: make() if now == (step, micro_batch) else nullcontext()
