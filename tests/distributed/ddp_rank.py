"""Steps in special modes of DDP, and on a rank whose data has ended, for test_ddp_modes.py."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint
from training_rank import error_of

from hf_memopt.training import GradientCache, MicroBatcher, find_micro_batch, train_step

Sizes = Sequence[Sequence[Sequence[int]]]  # samples of each micro-batch, for each window and rank

FOUR = [[[2, 2], [2, 2]]] * 2
ONE_FIRST = [[[3], [4]], [[2, 2], [1, 1, 2]], [[2], [1, 2]]]
SECOND_ENDS = [[[2, 2], [2]], [[2, 2], []], [[1], []]]


class Model(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last, self.never = (nn.Linear(4, num) for num in (4, 4, 3, 2))
        self.is_checkpointed = is_checkpointed
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = checkpoint(self.middle, hidden, use_reentrant=True) if self.is_checkpointed else self.middle(hidden)
        return self.last(torch.tanh(hidden))


class Run:
    """A model under DDP, and its twin in one process that trains on all ranks' samples."""

    def __init__(self, *, sync_each_batch: bool = False, is_checkpointed: bool = False, **ddp: Any) -> None:
        AcceleratorState._reset_state()
        self.accelerator = Accelerator(
            cpu=True,
            kwargs_handlers=[DistributedDataParallelKwargs(**ddp)],
            gradient_accumulation_plugin=GradientAccumulationPlugin(1, sync_each_batch=sync_each_batch),
        )
        self.rank = self.accelerator.process_index
        self.alone, model = Model(is_checkpointed), Model(is_checkpointed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.optimizer_alone = torch.optim.SGD(self.alone.parameters(), lr=0.1)
        self.inner = model
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def difference(self, step: Callable[[Sequence[Any]], Any], sizes: Sizes) -> float:
        """Train on all windows, and return the weights' largest difference from the single process."""
        generator = torch.Generator().manual_seed(1)
        for window in sizes:
            parts = [[make_batch(num, generator) for num in of_rank] for of_rank in window]
            step(parts[self.rank])
            self.optimizer_alone.zero_grad()
            mean_loss(self.alone, joined([batch for of_rank in parts for batch in of_rank])).backward()
            self.optimizer_alone.step()
        pairs = zip(self.inner.parameters(), self.alone.parameters(), strict=True)
        return max((own - alone).abs().max().item() for own, alone in pairs)

    def train_step(self, window: Sequence[Any], **options: Any) -> Any:
        return train_step(self.accelerator, self.model, mean_loss, window, self.optimizer, **options)

    def cache(self) -> GradientCache:
        return GradientCache(
            self.accelerator,
            lambda batch: (self.model(batch["x"]), batch["labels"]),
            nn.functional.cross_entropy,
            models=[self.model],
        )

    def cached_step(self, window: Sequence[Any]) -> Any:
        return self.cache().step(window, self.optimizer)

    def halving_step(self, window: Sequence[Any], **options: Any) -> Any:
        batcher = MicroBatcher(self.accelerator, 2)
        return batcher.train_step(self.model, mean_loss, joined(window), self.optimizer, **options)

    def search(self, window: Sequence[Any]) -> int:
        return find_micro_batch(self.accelerator, self.model, mean_loss, window[0], effective_batch=8)


def make_batch(num: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(num, 4, dtype=torch.float64, generator=generator),
        "labels": torch.randint(3, (num,), generator=generator),
    }


def joined(window: Sequence[Any]) -> dict[str, Tensor]:
    return {name: torch.cat([batch[name] for batch in window]) for name in ("x", "labels")}


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])


def windows_of(run: Run, sizes: Sizes) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [[make_batch(num, generator) for num in window[run.rank]] for window in sizes]


# ------------------------------------------------------------------------------------------------ Join


def refused_in_join() -> dict[str, Any]:
    run = Run(find_unused_parameters=True)
    window = windows_of(run, FOUR)[0]
    with Join([run.model]):
        errors = {
            "train_step": error_of(lambda: run.train_step(window)),
            "MicroBatcher": error_of(lambda: run.halving_step(window)),
            "find_micro_batch": error_of(lambda: run.search(window)),
            "GradientCache.step": error_of(lambda: run.cached_step(window)),
            "GradientCache.backward": error_of(lambda: run.cache().backward(window)),
            "GradientCache.loss": error_of(lambda: run.cache().loss(window)),
        }
    errors["after the block"] = error_of(lambda: run.train_step(window))
    with Join([run.model], enable=False):
        pass
    return {"errors": errors, "difference when off": run.difference(run.train_step, ONE_FIRST)}


# ------------------------------------------------------------------------------------------------ a rank without data


def ended(step: Callable[..., Any], how: str) -> Callable[[Sequence[Any]], Any]:
    """Return a step that repeats the last window with weight zero where data has ended."""
    last: list[Any] = []

    def go_on(window: Sequence[Any]) -> Any:
        if window:
            last[:] = window
            return step(window)
        if how == "no samples":
            return step([{name: value[:0] for name, value in last[0].items()}])
        if how == "no labels":
            return step([batch | {"labels": torch.full_like(batch["labels"], -100)} for batch in last])
        return step(last, weight_fn=lambda batch: 0)

    return go_on


def without_data() -> dict[str, float]:
    differences = {}
    for name, how in (
        ("train_step", "weight_fn"),
        ("train_step", "no labels"),
        ("halving_step", "weight_fn"),
        ("halving_step", "no labels"),
        ("cached_step", "no samples"),
    ):
        run = Run(find_unused_parameters=True)
        differences[f"{name}, {how}"] = run.difference(ended(getattr(run, name), how), SECOND_ENDS)
    return differences


# ------------------------------------------------------------------------------------------------ static graphs


def refused_with_a_static_graph() -> dict[str, Any]:
    """Return the second rank's errors alone, and the difference after their remedy."""
    run = Run(static_graph=True)
    window = windows_of(run, [[[2], [1, 1]]])[0]
    errors = {
        "train_step": error_of(lambda: run.train_step(window)),
        "MicroBatcher": error_of(lambda: run.halving_step(window)),
        "MicroBatcher, one micro-batch": error_of(lambda: run.halving_step(window[:1])),
        "find_micro_batch": error_of(lambda: run.search(window)),
        "GradientCache.step": error_of(lambda: run.cached_step(window)),
        "GradientCache.backward": error_of(lambda: run.cache().backward(window)),
        "GradientCache.loss": error_of(lambda: run.cache().loss(window)),
    }
    with torch.no_grad():
        run.cache().loss(window)  # works without gradients
    return {"errors": errors, "difference afterwards": run.difference(run.train_step, ONE_FIRST)}


def static_graphs() -> Iterator[tuple[str, float]]:
    for name in ("train_step", "cached_step"):
        run = Run(static_graph=True)
        yield f"{name}, one micro-batch first", run.difference(getattr(run, name), ONE_FIRST)
        run = Run(static_graph=True, sync_each_batch=True)
        yield f"{name}, sync_each_batch", run.difference(getattr(run, name), FOUR)
    run = Run(static_graph=True)

    def search_and_step(window: Sequence[Any]) -> None:
        assert run.search(window) == 4
        run.halving_step(window)

    steps = iter((run.train_step, search_and_step, run.halving_step))
    yield "halving_step after train_step", run.difference(lambda window: next(steps)(window), ONE_FIRST)


# ------------------------------------------------------------------------------------------------ unused parameters


def reentrant() -> float:
    """Checkpoint reentrantly, where DDP cannot find unused parameters while exchanging."""
    run = Run(find_unused_parameters=True, is_checkpointed=True)
    return run.difference(run.halving_step, ONE_FIRST)


def outcomes() -> dict[str, Any]:
    return {
        "join": refused_in_join(),
        "without data": without_data(),
        "refused static": refused_with_a_static_graph(),
        "static": dict(static_graphs()),
        "reentrant": reentrant(),
    }
