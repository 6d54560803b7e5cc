"""Exact steps under DDP, a function for each situation, for test_training_two_processes.py."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from hf_memopt.training import GradientCache, MicroBatcher, NonFiniteGradientError, find_micro_batch, train_step

SPLITS = {
    "1x8": ([8], [8]),
    "2x4": ([4] * 2, [4] * 2),
    "4x2": ([2] * 4, [2] * 4),
    "8x1": ([1] * 8, [1] * 8),
    "uneven": ([3, 3, 2], [5, 1]),
    "tail on one rank": ([4, 4], [1]),
}
# The precision, value, rank and micro-batch of each bad gradient.
BAD = {
    f"{precision}-{value}-{rank}-{micro_batch}": (precision, float(value), rank, micro_batch)
    for precision in ("fp32", "bf16", "fp16")
    for value in ("nan", "inf")
    for rank, micro_batch in ((0, 3), (1, 0), (1, 2))
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.extra, self.never = nn.Linear(8, 3), nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(()))
        self.double()

    def forward(self, x: Tensor, with_extra: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        return self.last(hidden) + (self.extra(hidden) if with_extra else 0)


class Run:
    """A run in float64, or in float32 with autocast."""

    def __init__(self, precision: str | None = None) -> None:
        AcceleratorState._reset_state()
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision="bf16" if precision == "bf16" else "no",
            kwargs_handlers=[unused],
            gradient_accumulation_steps=2,
        )
        if precision == "fp16":  # Accelerate refuses fp16 without a GPU
            self.accelerator.state._mixed_precision, self.accelerator.native_amp = "fp16", True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        self.rank = self.accelerator.process_index
        self.plain = Model()
        model = Model() if precision is None else Model().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *event: self.note(model))
        self.gradient = torch.empty(0)
        self.num_exchanges = 0
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.model.register_comm_hook(None, self.exchange)

    def note(self, model: nn.Module) -> None:
        self.gradient = vector(model)

    def exchange(self, state: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        """Average as DDP does, and count the exchanges."""
        self.num_exchanges += bucket.index() == 0
        future = torch.distributed.all_reduce(bucket.buffer() / 2, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    def difference(self, loss: Tensor) -> float:
        """Return the gradient's largest difference from that of `loss`, a loss of `plain`."""
        self.plain.zero_grad()
        loss.backward()
        return (self.gradient - vector(self.plain)).abs().max().item()


def vector(model: nn.Module) -> Tensor:
    return torch.cat(
        [
            torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.flatten()
            for parameter in model.parameters()
        ]
    ).clone()


def weights(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def samples(num: int, rank: int) -> Tensor:
    return torch.randn(num, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 + rank))


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def splits() -> Iterator[tuple[str, Any]]:
    for name, sizes in SPLITS.items():
        run = Run()
        parts = [samples(sum(of_rank), rank) for rank, of_rank in enumerate(sizes)]
        micro_batches = parts[run.rank].split(sizes[run.rank])
        result = train_step(run.accelerator, run.model, mean_loss, micro_batches, run.optimizer, weight_fn=len)
        loss = mean_loss(run.plain, torch.cat(parts))
        yield name, [run.difference(loss), abs(result.loss - loss.item()), run.num_exchanges]


def weightless() -> list[float]:
    """Give the second rank no tokens: its loss is NaN, and its gradient counts as 0."""
    run = Run()
    part = samples(4, run.rank)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return mean_loss(model, batch) + (0.0 if run.rank == 0 else float("nan"))

    weight = 1.0 - run.rank
    result = train_step(run.accelerator, run.model, loss_fn, [part], run.optimizer, weight_fn=lambda batch: weight)
    loss = mean_loss(run.plain, samples(4, 0))
    return [run.difference(loss), abs(result.loss - loss.item())]


def non_finite() -> dict[str, Any]:
    run = Run()
    parts = list(samples(8, run.rank).split(2))
    train_step(run.accelerator, run.model, mean_loss, parts, run.optimizer)
    before = weights(run.model)
    if run.rank == 1:
        parts[2] = parts[2] * float("nan")
    message = error_of(lambda: train_step(run.accelerator, run.model, mean_loss, parts, run.optimizer))
    return {"message": message, "before": before, "after": weights(run.model)}


def non_finite_in(precision: str, value: float, bad_rank: int, micro_batch: int) -> list[Any]:
    """Return two steps' outcomes, and whether the weights are unchanged."""
    run = Run(precision)
    parts = list(samples(8, run.rank).float().split(2))
    before = weights(run.model)
    if run.rank == bad_rank:
        parts[micro_batch] = parts[micro_batch] * value
    outcomes = []
    for _ in range(2):
        skipped: list[bool] = []
        message = error_of(
            lambda skipped=skipped: skipped.append(
                train_step(run.accelerator, run.model, mean_loss, parts, run.optimizer).skipped
            )
        )
        outcomes.append("skipped" if skipped == [True] else message)
    return [*outcomes, before == weights(run.model)]


def nothing_on_one_rank() -> str:
    run = Run()
    parts = [samples(2, 0)] if run.rank == 0 else []
    return error_of(lambda: train_step(run.accelerator, run.model, mean_loss, parts, run.optimizer))


def notes_of_running_out(batcher: MicroBatcher, model: nn.Module, batch: Any, optimizer: Any) -> list[str]:
    """Return the notes on the error when all ranks run out of memory."""

    def failing(model: nn.Module, batch: Any) -> Tensor:
        raise torch.OutOfMemoryError("injected")

    try:
        batcher.train_step(model, failing, batch, optimizer)
    except torch.OutOfMemoryError as error:
        return error.__notes__
    raise AssertionError("no error")


def error_of(step: Callable[[], Any]) -> str:
    try:
        step()
    except (NonFiniteGradientError, ValueError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def out_of_memory(bad_rank: int, fail_at: int, where: str) -> list[Any]:
    """Train in micro-batches of 2, with 7 and 8 samples, until `bad_rank` fails."""
    run = Run()
    sizes: list[int] = []

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        sizes.append(len(batch))
        failing = run.rank == bad_rank and len(sizes) == fail_at
        if failing and where == "before forward":
            raise torch.OutOfMemoryError("injected")
        loss = mean_loss(model, batch)
        if failing:
            loss.register_hook(fail)
        return loss

    parts = [samples(7, 0), samples(8, 1)]
    batcher = MicroBatcher(run.accelerator, 2)
    batcher.train_step(run.model, loss_fn, parts[run.rank], run.optimizer)
    difference = run.difference(mean_loss(run.plain, torch.cat(parts)))
    return [difference, sizes[-len(parts[run.rank]) :], batcher.micro_batch_size, weights(run.model)]


def fail(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("injected in backward")


def does_not_fit_on_one_rank() -> str:
    run = Run()

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        if run.rank == 0:
            raise torch.OutOfMemoryError("injected")
        return mean_loss(model, batch)

    batcher = MicroBatcher(run.accelerator, 2)
    return error_of(lambda: batcher.train_step(run.model, loss_fn, samples(4, run.rank), run.optimizer))


def used_on_one_rank() -> list[Any]:
    run = Run()
    parts = [samples(4, 0), samples(4, 1)]

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch, with_extra=run.rank == 1).square().mean()

    used: list[bool] = []
    run.optimizer.optimizer.register_step_pre_hook(
        lambda *event: used.extend(parameter.grad is not None for parameter in run.model.parameters())
    )
    MicroBatcher(run.accelerator, 2).train_step(run.model, loss_fn, parts[run.rank], run.optimizer)
    loss = (run.plain(parts[0]).square().mean() + run.plain(parts[1], True).square().mean()) / 2
    return [run.difference(loss), used]


def search() -> int:
    run = Run()

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        if len(batch) > (6, 3)[run.rank]:
            raise torch.OutOfMemoryError("injected")
        return mean_loss(model, batch)

    return find_micro_batch(run.accelerator, run.model, loss_fn, samples(4, run.rank), effective_batch=24)


def gradient_cache() -> dict[str, Any]:
    """Use a loss with random numbers over both ranks' outputs, of 7 and 5 samples."""
    run = Run()
    drawn: list[Tensor] = []

    def loss_fn(output: Tensor) -> Tensor:
        drawn.append(torch.randn(3, 8, dtype=output.dtype) * random.random())
        return sliced_wasserstein(output, drawn[0])

    parts = [samples(7, 0), samples(5, 1)]
    torch.manual_seed(run.rank)
    random.seed(run.rank)
    cache = GradientCache(run.accelerator, lambda batch: run.model(batch), loss_fn, models=[run.model])
    loss = cache.backward(parts[run.rank].split(2))
    run.note(run.model)
    want = sliced_wasserstein(run.plain(torch.cat(parts)), drawn[0])
    return {
        "difference": run.difference(want),
        "loss": loss.item(),
        "loss difference": abs(loss.item() - want.item()),
        "exchanges": run.num_exchanges,
        "draws": drawn[0].tolist(),
        "next draw": torch.rand(1).item(),
        "without models": error_of(lambda: GradientCache(run.accelerator, lambda batch: batch, loss_fn)),
    }


def sliced_wasserstein(output: Tensor, directions: Tensor) -> Tensor:
    target = torch.linspace(0, 1, len(output), dtype=output.dtype)[:, None]
    return ((output @ directions).sort(0).values - target).square().mean()


def outcomes() -> dict[str, Any]:
    return {
        "splits": dict(splits()),
        "weightless": weightless(),
        "non-finite": non_finite(),
        "non-finite in": {case: non_finite_in(*arguments) for case, arguments in BAD.items()},
        "nothing on one rank": nothing_on_one_rank(),
        "out of memory": [
            out_of_memory(bad_rank, fail_at, ("before forward", "backward")[(bad_rank + fail_at) % 2])
            for bad_rank in (0, 1)
            for fail_at in range(1, 5)
        ],
        "does not fit on one rank": does_not_fit_on_one_rank(),
        "used on one rank": used_on_one_rank(),
        "search": search(),
        "gradient cache": gradient_cache(),
    }
