"""Optimizers by name."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from hf_memopt.training.low_bit import low_bit_adamw

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "adamw-8bit": lambda parameters: low_bit_adamw(8)(parameters),
    "adamw-4bit": lambda parameters: low_bit_adamw(4)(parameters),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}
# These keep tables for the process, so that a second simulation is not like the first.
WITH_TABLES = ("adamw-8bit", "adamw-4bit")
