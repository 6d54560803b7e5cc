"""Errors of a neural operator, as neuralop's losses measure them."""

from typing import Any

import torch
from accelerate import Accelerator
from neuralop import H1Loss, LpLoss
from torch import Tensor, nn
from torch.utils.data import DataLoader

# Sums over the samples of a batch. H1Loss takes fields for periodic by default, which these are not.
LOSSES = {"l2": LpLoss(d=2, p=2), "h1": H1Loss(d=2, periodic_in_x=False, periodic_in_y=False)}


def evaluate(
    model: nn.Module, processor: Any, tests: dict[int, DataLoader[Any]], accelerator: Accelerator
) -> dict[str, float]:
    """Return mean relative errors by test resolution and norm, as `l2_<resolution>` and `h1_<resolution>`."""
    model.eval()
    processor.eval()
    found: dict[str, float] = {}
    with torch.no_grad():
        for resolution, batches in tests.items():
            errors = torch.cat([accelerator.gather_for_metrics(_errors(model, processor, batch)) for batch in batches])
            found |= {
                f"{name}_{resolution}": mean.item() for name, mean in zip(LOSSES, errors.mean(dim=0), strict=True)
            }
    model.train()
    processor.train()
    return found


def _errors(model: nn.Module, processor: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the relative errors of a batch, `(batch, norms)`."""
    batch = processor.preprocess(batch)
    output, batch = processor.postprocess(model(batch["x"]), batch)
    pairs = zip(output.split(1), batch["y"].split(1), strict=True)
    return torch.stack([torch.stack([loss(ours, truth) for loss in LOSSES.values()]) for ours, truth in pairs])
