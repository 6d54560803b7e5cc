"""One update of `train_causal_lm.py`, as its loop and its plans run it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.recipes.causal_lm.options import Options
from hf_memopt.recipes.common import loop
from hf_memopt.training.low_bit import low_bit_adamw
from hf_memopt.weights import OffloadedOptimizer, StreamedWeights

Batch = dict[str, Tensor]


@dataclass(kw_only=True)
class Run(loop.Run):
    held_out: Any = None  # batches to evaluate on
    weights: StreamedWeights | None = None

    def visiting(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass whose weights may visit the device."""
        return nullcontext() if self.weights is None else self.weights.stream()


def stream_weights(model: nn.Module, options: Options, device: torch.device) -> StreamedWeights | None:
    """Give weights, and later their gradients, the home that the flags name."""
    training = options.training
    if training.base == "off":
        return None
    return StreamedWeights(model, home=training.base, trained=True, device=device, disk=options.offload.disk)


def make_optimizer(
    model: nn.Module, options: Options, device: torch.device, weights: StreamedWeights | None
) -> torch.optim.Optimizer:
    """Return AdamW. On an accelerator it is the fused one: the other's temporaries are as large as the weights."""
    training = options.training
    settings: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": training.weight_decay}
    optimizer: torch.optim.Optimizer
    if training.optimizer_bits != 32:
        optimizer = low_bit_adamw(training.optimizer_bits)(model.parameters(), **settings)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True if device.type != "cpu" else None, **settings)
    if training.optimizer_home != "off":  # hf_memopt
        optimizer = OffloadedOptimizer(optimizer, home=training.optimizer_home, disk=options.offload.disk)
    return optimizer if weights is None else weights.adopt(optimizer)  # hf_memopt


def update(run: Run, batches: Iterator[Batch]) -> Tensor:
    """Make one update of the weights; return the mean loss of this process's batches, on the device."""
    losses = []
    for _ in range(run.accelerator.gradient_accumulation_steps):
        batch = next(batches)
        with run.accelerator.accumulate(run.model):
            # Only the forward pass is in the offloader's context; backward brings its saved tensors back by itself.
            with run.memory.phase("forward"), run.saving(), run.visiting():
                loss = run.model(**batch, labels=batch["input_ids"]).loss
            with run.memory.phase("backward"):
                run.accelerator.backward(loss)
            run.end_micro_batch(loss)
            with run.memory.phase("optimizer"):
                # In the middle of a window, accelerate's optimizer and scheduler do nothing.
                if run.accelerator.sync_gradients:
                    run.before_update()
                    norm = run.options.training.max_grad_norm
                    run.accelerator.clip_grad_norm_(run.model.parameters(), norm)
                run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()
        losses.append(loss.detach())
    run.progress.num_updates += 1
    return torch.stack(losses).mean()
