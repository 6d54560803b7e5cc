"""Losses and gradients of the architectures that tests compare, on whatever device they are."""

from contextlib import nullcontext

import torch
from architectures import Workload
from torch import Tensor

from hf_memopt import ActivationOffloader

Gradients = list[Tensor | None]


def loss_of(workload: Workload, autocast: bool = False, offloader: ActivationOffloader | None = None) -> Tensor:
    torch.manual_seed(7)  # dropout, layer drop and posterior samples are those of the plain run
    context = nullcontext() if offloader is None else offloader.offload_context(workload.module)
    device_type = next(workload.module.parameters()).device.type
    with context, torch.autocast(device_type, torch.bfloat16, enabled=autocast):
        return workload.loss()


def gradients(workload: Workload, autocast: bool = False, offloader: ActivationOffloader | None = None) -> Gradients:
    loss_of(workload, autocast, offloader).backward()
    found = [parameter.grad for parameter in workload.module.parameters()]
    workload.module.zero_grad()
    return found


def equal(first: Gradients, second: Gradients) -> bool:
    """None, for a layer that was dropped or an input that does not occur, equals None alone."""
    pairs = zip(first, second, strict=True)
    return all(b is None if a is None else b is not None and torch.equal(a, b) for a, b in pairs)
