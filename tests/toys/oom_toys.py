"""A toy step on the CPU that runs out of memory in a chosen phase."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM, BATCH = 24, 6


class NoMoreMemory(torch.autograd.Function):
    """An identity whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise out_of_memory()


class Block(nn.Module):
    """A residual block that can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)
        self.register_buffer("scale", torch.ones(DIM))
        self.fails_at: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        if self.fails_at == "forward":
            raise out_of_memory()
        if self.fails_at == "backward":
            hidden = NoMoreMemory.apply(hidden)
        return x + self.down(hidden) * self.scale


class Step:
    """Training steps of three blocks, of which the middle one fails on demand."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(Block(), Block(), Block())
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(BATCH, DIM)
        self.run()

    def run(self) -> None:
        self.model(self.x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fail(self, where: str) -> None:
        getattr(self, f"_fail_in_{where}")()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(self.x)

    def _fail_in_forward(self) -> None:
        self.model[1].fails_at = "forward"
        self.run()

    def _fail_in_backward(self) -> None:
        self.model[1].fails_at = "backward"
        self.run()

    def _fail_in_recompute(self) -> None:
        loss = checkpoint(self.model, self.x, use_reentrant=False).sum()
        self.model[1].fails_at = "forward"
        loss.backward()

    def _fail_in_optimizer(self) -> None:
        self.model(self.x).sum().backward()
        self.optimizer.register_step_pre_hook(fail)
        self.optimizer.step()

    def _fail_in_evaluation(self) -> None:
        self.model[1].fails_at = "forward"
        self.evaluate()


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fail(*args: Any) -> None:
    raise out_of_memory()
