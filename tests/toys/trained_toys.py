"""A model with every kind of weight that an engine may get wrong, and updates of it, streamed or plain."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from optimizer_toys import MAKERS, equal
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from hf_memopt import OffloadedOptimizer, StreamedWeights

WIDTH, ROWS = 32, 200


class Network(nn.Module):
    """A table tied to the head, a layer that is used twice, one that is not, and batch normalisation."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.narrow, self.twice, self.wide = nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.back = nn.Linear(2 * WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight
        self.checkpointing = checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = self._run(lambda x: self.twice(torch.tanh(self.twice(self.narrow(x)))), x)
        x = self.norm(self.wide(x))
        return self.head(self._run(lambda x: torch.tanh(self.back(x)), x))

    def _run(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.checkpointing == "none":
            return block(x)
        found: Tensor = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return found


def network(checkpointing: str = "none", dtype: torch.dtype = torch.float32) -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Network(checkpointing).to(dtype)


def loss_of(model: nn.Module, number: int, autocast: bool = False) -> Tensor:
    device = next(model.parameters()).device
    ids = torch.randint(0, ROWS, (24,), generator=torch.Generator().manual_seed(number)).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        return nn.functional.cross_entropy(model(ids).float(), ids)


@dataclass
class Training:
    """Updates after two micro-batches and clipping; `home` is that of the weights, "" for plain ones."""

    model: nn.Module
    home: str = ""
    kind: str = "adamw"
    autocast: bool = False
    max_norm: float | None = 0.1
    loss_of: Callable[[nn.Module, int, bool], Tensor] = loss_of
    device: str = "cpu"

    def start(self, **options: Any) -> "Training":
        self.weights: StreamedWeights | None = None
        if self.home:
            home: Any = self.home
            self.weights = StreamedWeights(self.model, home=home, trained=True, device=self.device, **options)
        self.model.to(self.device)
        self.optimizer: Optimizer = MAKERS[self.kind]([each for each in self.model.parameters() if each.requires_grad])
        self.adopted: OffloadedOptimizer | None = None
        if self.weights is not None:
            self.adopted = self.weights.adopt(self.optimizer)
        self.found: list[Any] = []
        return self

    def backward(self, number: int) -> None:
        for micro_batch in range(2):
            torch.manual_seed(10 * number + micro_batch)
            with self.weights.stream() if self.weights else nullcontext():
                loss = self.loss_of(self.model, 10 * number + micro_batch, self.autocast)
            loss.backward()
            self.found.append(loss.detach())
        if self.max_norm is not None:
            self.found.append(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm))

    def update(self, number: int) -> None:
        self.backward(number)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, num_updates: int = 3) -> "Training":
        for number in range(num_updates):
            self.update(number)
        return self

    def results(self) -> list[Any]:
        """Return losses, norms, weights, buffers and the optimizer's state."""
        return [*self.found, self.model.state_dict(), self.optimizer.state_dict()]


def trained(home: str = "", num_updates: int = 3, make: Callable[[], nn.Module] = network, **options: Any) -> Training:
    own = {name: options.pop(name) for name in ("kind", "autocast", "max_norm", "loss_of", "device") if name in options}
    return Training(make(), home, **own).start(**options).run(num_updates)


def are_equal(one: Training, other: Training) -> bool:
    return equal(one.results(), other.results())


def gradients(model: nn.Module) -> Iterator[Tensor]:
    return (each.grad for each in model.parameters() if each.grad is not None)
