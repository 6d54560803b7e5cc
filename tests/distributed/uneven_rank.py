"""Two ranks of DDP with unequal numbers of passes or unequal budgets, for test_uneven_ranks.py."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from adversarial_copier import AdversarialCopier
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from hf_memopt import ActivationOffloader
from hf_memopt.training import MicroBatcher, train_step

BUDGET_GIB = 0.0005  # a third of the bytes that a pass saves
ROWS, WIDTH = 128, 64


class Run:
    """A model under DDP, with or without an offloader."""

    def __init__(self, offloader: ActivationOffloader | None) -> None:
        torch.manual_seed(0)
        hidden = 4 * WIDTH
        layers = [nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)]
        model = nn.Sequential(*layers)
        self.accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.offloader = offloader
        self.rank = dist.get_rank()
        self.generator = torch.Generator().manual_seed(self.rank)

    def rows(self, num: int = ROWS) -> Tensor:
        return torch.randn(num, WIDTH, generator=self.generator)

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        with self.offloader.offload_context(model) if self.offloader else nullcontext():
            return (model(rows) - 1).square().mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def steps(run: Run) -> None:
    """Use one micro-batch on the first rank and three on the second."""
    for _ in range(4):
        window = [run.rows() for _ in range((1, 3)[run.rank])]
        train_step(run.accelerator, run.model, run.loss, window, run.optimizer)


def halving(run: Run) -> None:
    """Run a rank out of memory when one rank has made one pass and the other 4."""
    batcher = MicroBatcher(run.accelerator, ROWS)
    num_passes = 0

    def loss_fn(model: nn.Module, rows: Tensor) -> Tensor:
        nonlocal num_passes
        num_passes += 1
        if run.rank == 1 and num_passes == 2:
            raise torch.OutOfMemoryError("injected")
        return run.loss(model, rows)

    for _ in range(2):
        batcher.train_step(run.model, loss_fn, run.rows(4 * ROWS), run.optimizer)
    assert batcher.micro_batch_size == ROWS // 2


def plain_loop(run: Run) -> None:
    """Use one micro-batch per update on the first rank and three on the second."""
    num_micro_batches = (1, 3)[run.rank]
    for _ in range(4):
        for number in range(num_micro_batches):
            is_last = number == num_micro_batches - 1
            with nullcontext() if is_last else run.accelerator.no_sync(run.model):
                run.accelerator.backward(run.loss(run.model, run.rows()) / num_micro_batches)
        run.update()


def joined(run: Run) -> None:
    """Use torch's `Join`, with five updates on the first rank and one on the second."""
    with Join([run.model]):
        for _ in range((5, 1)[run.rank]):
            run.loss(run.model, run.rows()).backward()
            run.update()


def updates(run: Run) -> None:
    for _ in range(4):
        run.accelerator.backward(run.loss(run.model, run.rows()))
        run.update()


# The loop of each case, and the budget of each rank.
CASES: dict[str, tuple[Callable[[Run], None], tuple[float | None, float | None]]] = {
    "train_step": (steps, (BUDGET_GIB, BUDGET_GIB)),
    "MicroBatcher": (halving, (BUDGET_GIB, BUDGET_GIB)),
    "plain loop": (plain_loop, (BUDGET_GIB, BUDGET_GIB)),
    "Join": (joined, (BUDGET_GIB, BUDGET_GIB)),
    "a budget on the first rank": (updates, (BUDGET_GIB, None)),
    "two budgets": (updates, (BUDGET_GIB, 2 * BUDGET_GIB)),
}


def outcome(train: Callable[[Run], None], budgets_gib: tuple[float | None, float | None]) -> Iterator[dict[str, Any]]:
    """Yield the plain, then the offloaded run's results."""
    budget_gib = budgets_gib[dist.get_rank()]
    for offloader in (
        None,
        ActivationOffloader(budget_gib=budget_gib, offload_threshold_mb=0.01, copier=AdversarialCopier("late")),
    ):
        run = Run(offloader)
        train(run)
        weights = torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])
        found = {"weights": weights.tolist()}
        yield (
            found
            if offloader is None
            else found
            | {
                "moved": offloader.stats.bytes_moved,
                "peak_gib": offloader.stats.measured_peak_gib,
                "has planned": offloader.stats.predicted_peak_gib is not None,
            }
        )


def outcomes() -> dict[str, Any]:
    Accelerator(cpu=True)  # makes the process group
    return {name: list(outcome(*case)) for name, case in CASES.items()}
