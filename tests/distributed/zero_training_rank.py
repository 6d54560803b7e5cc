"""Exact steps under ZeRO-2 and ZeRO-3, each beside a plain step, for test_zero_training.py."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn
from training_rank import SPLITS, error_of, mean_loss, notes_of_running_out, samples
from zero_rank import deepspeed_on_the_cpu, zero

from hf_memopt.training import GradientCache, MicroBatcher, find_micro_batch, train_step

LEARNING_RATE = 0.1


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


class ZeroRun:
    """A model in DeepSpeed's engine and a plain twin; a `max_grad_norm` of 0 clips nothing."""

    def __init__(self, stage: int, max_grad_norm: float = 0.0, precision: str = "no") -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        options = {**zero(stage), "gradient_clipping": max_grad_norm, "gradient_accumulation_steps": 3}
        plugin = DeepSpeedPlugin(hf_ds_config=options)
        self.accelerator = Accelerator(mixed_precision=precision, deepspeed_plugin=plugin)
        self.rank = self.accelerator.process_index
        self.plain, model = network(), network()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self, micro_batches: Any, **options: Any) -> Any:
        return train_step(self.accelerator, self.model, mean_loss, micro_batches, self.optimizer, **options)

    def weights(self) -> Tensor:
        with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
            return torch.cat([parameter.detach().float().flatten() for parameter in self.model.parameters()])

    def plain_step(
        self, batch: Tensor, max_grad_norm: float = float("inf"), loss_fn: Callable[[Any, Any], Tensor] = mean_loss
    ) -> tuple[float, float]:
        self.plain.zero_grad()
        loss = loss_fn(self.plain, batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.plain.parameters(), max_grad_norm)
        with torch.no_grad():
            for parameter in self.plain.parameters():
                parameter -= LEARNING_RATE * parameter.grad
        return loss.item(), norm.item()

    def difference(self) -> float:
        plain = torch.cat([parameter.detach().flatten() for parameter in self.plain.parameters()])
        return (self.weights() - plain).abs().max().item()


def batches(num_samples: int, rank: int) -> Tensor:
    return samples(num_samples, rank).float()


def splits(stage: int) -> dict[str, list[float]]:
    """Take each split twice: the second must not add to the first's gradients."""
    found = {}
    for name, sizes in SPLITS.items():
        run, differences = ZeroRun(stage), []
        for number in (0, 1):
            parts = [batches(sum(of_rank), 2 * number + rank) for rank, of_rank in enumerate(sizes)]
            result = run.step(parts[run.rank].split(sizes[run.rank]))
            loss, norm = run.plain_step(torch.cat(parts))
            differences += [run.difference(), abs(result.loss - loss), abs(result.grad_norm - norm)]
        found[name] = differences
    return found


def clipped(stage: int) -> dict[str, Any]:
    run, parts = ZeroRun(stage, max_grad_norm=0.1), [batches(4, rank) for rank in (0, 1)]
    refused = error_of(lambda: run.step([parts[run.rank]]))
    result = run.step([parts[run.rank]], max_grad_norm=0.1)
    _, norm = run.plain_step(torch.cat(parts), 0.1)
    return {"refused": refused, "differences": [run.difference(), abs(result.grad_norm - norm)]}


def non_finite(stage: int, precision: str) -> dict[str, Any]:
    run = ZeroRun(stage, precision=precision)
    # DeepSpeed casts weights, but not inputs.
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    parts = list(batches(8, run.rank).to(dtype).split(2))
    run.step(parts)
    before = run.weights()
    bad = [part * float("nan") if run.rank == 1 and number == 2 else part for number, part in enumerate(parts)]
    message = error_of(lambda: run.step(bad))
    return {
        "message": message,
        "unchanged": torch.equal(before, run.weights()),
        "step": run.accelerator.step,
        "again": error_of(lambda: run.step(parts)),
    }


def contrastive(outputs: Tensor) -> Tensor:
    """Return a loss over all pairs, which is no mean over micro-batches."""
    return (outputs @ outputs.T).logsumexp(dim=1).mean() + outputs.std()


def cached(stage: int) -> dict[str, Any]:
    """Take two steps with unequal micro-batches, then an unequal and a non-finite one."""
    run, differences = ZeroRun(stage), []
    cache = GradientCache(run.accelerator, run.model, contrastive)
    sizes = ([3, 1], [2, 3])
    for number in (0, 1):
        parts = [batches(sum(of_rank), 2 * number + rank) for rank, of_rank in enumerate(sizes)]
        result = cache.step(parts[run.rank].split(sizes[run.rank]), run.optimizer)
        loss, norm = run.plain_step(torch.cat(parts), loss_fn=lambda model, batch: contrastive(model(batch)))
        differences += [run.difference(), abs(result.loss - loss), abs(result.grad_norm - norm)]
    unequal = error_of(lambda: cache.step([batches(2, 0)] * (1 + run.rank), run.optimizer))
    before, good = run.weights(), batches(2, run.rank)
    bad = error_of(lambda: cache.step([good, good * float("nan") if run.rank else good], run.optimizer))
    return {
        "differences": differences,
        "unequal": unequal,
        "bad": bad,
        "unchanged": torch.equal(before, run.weights()),
        "again": error_of(lambda: cache.step([good], run.optimizer)),
    }


def micro_batcher(stage: int) -> dict[str, Any]:
    run, parts = ZeroRun(stage), [batches(5, rank) for rank in (0, 1)]
    batcher = MicroBatcher(run.accelerator, 2)
    result = batcher.train_step(run.model, mean_loss, parts[run.rank], run.optimizer)
    loss, norm = run.plain_step(torch.cat(parts))
    differences = [run.difference(), abs(result.loss - loss), abs(result.grad_norm - norm)]
    notes = notes_of_running_out(batcher, run.model, parts[run.rank], run.optimizer)
    return {"differences": differences, "notes": notes}


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor) -> Tensor:
        return contrastive(outputs * self.scale)


def refused() -> dict[str, str]:
    first, second = ZeroRun(1), ZeroRun(2)
    cache = GradientCache(second.accelerator, second.model, contrastive)
    learnt = GradientCache(second.accelerator, second.model, Temperature())
    with patch.object(second.model, "fp16_enabled", lambda: True):  # refused by DeepSpeed on a CPU
        fp16 = error_of(lambda: GradientCache(second.accelerator, second.model, contrastive))
    return {
        "fp16": fp16,
        "stage": error_of(lambda: first.step([batches(2, 0)])),
        "backward": error_of(lambda: cache.backward([batches(2, 0)])),
        "loss": error_of(lambda: cache.loss([batches(2, 0)])),
        "parameters": error_of(lambda: learnt.step([batches(2, 0)], second.optimizer)),
        "search": error_of(
            lambda: find_micro_batch(second.accelerator, second.model, mean_loss, batches(2, 0), effective_batch=4)
        ),
    }


def outcomes() -> dict[str, Any]:
    with deepspeed_on_the_cpu():
        results: dict[str, Any] = {
            str(stage): {
                "splits": splits(stage),
                "clipped": clipped(stage),
                "cached": cached(stage),
                "micro-batcher": micro_batcher(stage),
                "non-finite": [non_finite(stage, precision) for precision in ("no", "bf16")],
            }
            for stage in (2, 3)
        }
        results["refused"] = refused()
    return results
