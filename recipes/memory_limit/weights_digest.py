"""A hash of all weights, to compare those of two processes."""

import hashlib

import torch
from torch import nn


@torch.no_grad()
def weights_digest(model: nn.Module) -> str:
    """Return a hash of all weights, bit for bit."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        found.update(memoryview(real.contiguous().numpy()).cast("B"))
    return found.hexdigest()
