"""Optimizers by name."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from hf_memopt.estimate.simulation.quantised.block_wise_adamw import BlockWiseAdamW
from hf_memopt.training.low_bit import low_bit_adamw

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "adamw-8bit": lambda parameters: low_bit_adamw(8)(parameters),
    "adamw-4bit": lambda parameters: low_bit_adamw(4)(parameters),
    "adamw-8bit-bnb": lambda parameters: BlockWiseAdamW(parameters, bits=8, is_paged=False),
    "paged-adamw-8bit": lambda parameters: BlockWiseAdamW(parameters, bits=8, is_paged=True),
    "paged-adamw-32bit": lambda parameters: BlockWiseAdamW(parameters, bits=32, is_paged=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}
# torchao's, which keep tables for a process.
WITH_TABLES = ("adamw-8bit", "adamw-4bit")


def make_tables() -> None:
    """Make the tables of torchao's optimizers: one that finds none makes them in the step, unlike all others."""
    from torchao.optim import subclass_4bit, subclass_8bit

    for module in (subclass_4bit, subclass_8bit):
        module.get_qmap_signed()
        module.get_qmap_unsigned()


def update_in_backward(parameters: list[nn.Parameter], name: str) -> None:
    """Update each weight, with an optimizer of its own, as soon as its gradient is there, which is dropped then."""
    for parameter in parameters:
        optimizer = OPTIMIZERS[name]([parameter])

        def update(parameter: Tensor, optimizer: Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
