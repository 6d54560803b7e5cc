"""A small model that trains with any optimizer, and optimizers that couple parameters."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from hf_memopt import OffloadedOptimizer

WIDTH = 64

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda each: optim.AdamW(each, 1e-2),
    "adamw foreach": lambda each: optim.AdamW(each, 1e-2, foreach=True),
    "adamw fused": lambda each: optim.AdamW(each, 1e-2, fused=True),
    "adam amsgrad": lambda each: optim.Adam(each, 1e-2, amsgrad=True),
    "sgd": lambda each: optim.SGD(each, 1e-2, momentum=0.9),
    "sgd foreach": lambda each: optim.SGD(each, 1e-2, momentum=0.9, foreach=True),
    "sgd fused": lambda each: optim.SGD(each, 1e-2, momentum=0.9, fused=True),
    "sgd without state": lambda each: optim.SGD(each, 1e-2),
    "adagrad": lambda each: optim.Adagrad(each, 1e-2),
    "adadelta": lambda each: optim.Adadelta(each, 1.0),
    "adamax": lambda each: optim.Adamax(each, 1e-2),
    "nadam": lambda each: optim.NAdam(each, 1e-2),
    "radam": lambda each: optim.RAdam(each, 1e-2),
    "rmsprop": lambda each: optim.RMSprop(each, 1e-2, momentum=0.5, centered=True),
    "rmsprop foreach": lambda each: optim.RMSprop(each, 1e-2, momentum=0.5, foreach=True),
    "rprop": lambda each: optim.Rprop(each, 1e-2),
    "asgd": lambda each: optim.ASGD(each, 1e-2),
    "adafactor": lambda each: optim.Adafactor(each, 1e-2),
}


def model(dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 7)).to(device, dtype)


def backward(network: nn.Module, number: int) -> None:
    """Accumulate the gradients of two micro-batches, and clip them."""
    first = next(network.parameters())
    for micro_batch in range(2):
        generator = torch.Generator().manual_seed(10 * number + micro_batch)
        x = torch.randn(16, WIDTH, generator=generator).to(first.device, first.dtype)
        network(x).square().mean().backward()
    nn.utils.clip_grad_norm_(network.parameters(), 0.1)


def train(network: nn.Module, optimizer: Optimizer, updates: range = range(4)) -> None:
    """Update with clipping, accumulation and a schedule that goes on where the last call ended."""
    for number in updates:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + number)
        backward(network, number)
        optimizer.step()
        optimizer.zero_grad()


def tensors(state: Any) -> Iterator[Any]:
    """Yield what a state dict holds, in order."""
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            yield key
            yield from tensors(state[key])
    elif isinstance(state, list | tuple):
        for each in state:
            yield from tensors(each)
    else:
        yield state.detach().cpu() if isinstance(state, Tensor) else state


def equal(one: Any, other: Any) -> bool:
    """Return whether two state dicts, or lists of tensors, are bitwise the same."""
    left, right = list(tensors(one)), list(tensors(other))
    return len(left) == len(right) and all(
        (a.dtype == b.dtype and torch.equal(a, b)) if isinstance(a, Tensor) else a == b
        for a, b in zip(left, right, strict=True)
    )


def same(one: tuple[nn.Module, Optimizer], other: tuple[nn.Module, Optimizer]) -> bool:
    """Return whether weights and states of the optimizers are bitwise the same."""
    weights = equal(one[0].state_dict(), other[0].state_dict())
    return weights and equal(one[1].state_dict(), other[1].state_dict())


def trained(kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, Optimizer]:
    """Train the model with a plain optimizer, or with one whose state has a home."""
    network = model(dtype)
    optimizer = MAKERS[kind](network.parameters())
    if options:
        optimizer = OffloadedOptimizer(optimizer, **options)
    train(network, optimizer)
    return network, optimizer


class Coupled(Optimizer):
    """Momentum with a part that reaches beyond a parameter.

    Args:
        how: "norm" divides by the norm of all gradients; "mean" moves weights to the mean of all; "counter" in the
            group changes the rate, as schedule-free optimizers do, and "late counter" appears with the first update, as
            Apex's do, which is no coupling; "distance" sums what all
            parameters have moved in the group, as Prodigy does.
    """

    def __init__(self, parameters: Any, how: str) -> None:
        super().__init__(parameters, {"lr": 0.01, "how": how, "distance": 0.0})
        for group in self.param_groups if how == "counter" else ():
            group["count"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in every]).norm().clamp(min=1) if every else 1.0
        mean = torch.stack([each.mean() for each in every]).mean() if every else 0.0
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for each in group["params"]:
                if each.grad is None:
                    continue
                momentum = self.state[each].setdefault("momentum", torch.zeros_like(each))
                momentum.mul_(0.9).add_(each.grad / norm if group["how"] == "norm" else each.grad)
                rate = group["lr"] / group["count"] if "counter" in group["how"] else group["lr"]
                each.sub_(momentum, alpha=rate)
                if group["how"] == "mean":
                    each.lerp_(mean.expand_as(each), 0.01)
                if group["how"] == "distance":
                    group["distance"] += momentum.abs().sum().item()
                    each.mul_(1 - 1e-3 * group["distance"])
