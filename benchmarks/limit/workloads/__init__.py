"""Trainings on a CPU whose memory is mostly saved activations, each in a module that imports its libraries alone."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# By name, the module that makes it.
WORKLOADS = {
    "language model": "language_model",
    "neural operator": "neural_operator",
    "style transfer": "style_transfer",
}


@dataclass(frozen=True)
class Workload:
    """A training, ready to run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]  # forward pass and loss of the next batch
    # The same of a batch that is small, which makes everything else that a step leaves in memory.
    loss_of_little: Callable[[], Tensor]
    blocks: list[nn.Module]  # to which activation checkpointing applies


def make_workload(name: str, is_toy: bool) -> Workload:
    made: Workload = importlib.import_module(f"{__name__}.{WORKLOADS[name]}").make(is_toy)
    return made
