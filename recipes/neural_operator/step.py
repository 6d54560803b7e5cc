"""One update of `train_neural_operator.py`, as its loop and its plans run it, and errors as neuralop measures them."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from neuralop import H1Loss, LpLoss
from neuralop.training import AdamW
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_memopt.recipes.common import loop
from hf_memopt.recipes.neural_operator.options import TrainingOptions
from hf_memopt.training import split_batch

Batch = dict[str, Tensor]

# Sums over the samples of a batch. H1Loss takes fields for periodic by default, which these are not.
LOSSES = {"l2": LpLoss(d=2, p=2), "h1": H1Loss(d=2, periodic_in_x=False, periodic_in_y=False)}


@dataclass(kw_only=True)
class Run(loop.Run):
    processor: Any  # normalises samples, and solutions back
    tests: dict[int, DataLoader[Any]] = field(default_factory=dict)  # batches by resolution

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epoch_loss = torch.zeros((), device=self.accelerator.device)

    def position(self) -> dict[str, Any]:
        """Return it with the epoch's mean loss over processes, whose own sums are not kept."""
        return {**super().position(), "epoch_loss": self.accelerator.reduce(self.epoch_loss, "mean").item()}

    def restore(self, position: dict[str, Any]) -> None:
        self.epoch_loss.fill_(position.pop("epoch_loss"))
        super().restore(position)


def make_optimizer(model: nn.Module, training: TrainingOptions) -> Any:
    """Return neuralop's AdamW, which knows complex weights."""
    return AdamW(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)


def update(run: Run, batch: Batch) -> Tensor:
    """Make one update of the weights; return the batch's mean loss, on the device.

    A sample's relative error is its own, so that micro-batches give the gradient of the whole batch up to rounding.
    """
    training = run.options.training
    batch = run.processor.preprocess(batch)
    parts = list(split_batch(batch, training.micro_batch_size or training.batch_size))
    losses = []
    for number, part in enumerate(parts, start=1):
        # Gradients are exchanged between processes once, in the last part's backward.
        with nullcontext() if number == len(parts) else run.accelerator.no_sync(run.model):
            # The offloader's context is around the forward pass; backward brings back the moved tensors.
            with run.memory.phase("forward"), run.saving():
                output, part = run.processor.postprocess(run.model(part["x"]), part)
                loss = LOSSES[training.train_loss](output, part["y"]) / len(batch["y"])
            with run.memory.phase("backward"):
                run.accelerator.backward(loss)
        losses.append(loss.detach())
    with run.memory.phase("optimizer"):
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
    run.progress.num_updates += 1
    return torch.stack(losses).sum()


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """Return mean relative errors by test resolution and norm, as `l2_<resolution>` and `h1_<resolution>`."""
    run.model.eval()
    run.processor.eval()
    found: dict[str, float] = {}
    for resolution, batches in run.tests.items():
        errors = torch.cat([run.accelerator.gather_for_metrics(_errors(run, batch)) for batch in batches])
        means = errors.mean(dim=0).tolist()
        found |= {f"{name}_{resolution}": mean for name, mean in zip(LOSSES, means, strict=True)}
    run.model.train()
    run.processor.train()
    return found


def _errors(run: Run, batch: Batch) -> Tensor:
    batch = run.processor.preprocess(batch)
    output, batch = run.processor.postprocess(run.model(batch["x"]), batch)
    pairs = zip(output.split(1), batch["y"].split(1), strict=True)
    return torch.stack([torch.stack([loss(ours, truth) for loss in LOSSES.values()]) for ours, truth in pairs])
