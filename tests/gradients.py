"""Gradients taken off a model, and compared to the bit."""

import torch
from torch import Tensor, nn


def take_gradients(model: nn.Module) -> list[Tensor]:
    """A copy of each gradient; the model has none afterwards."""
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether there are as many and all are the same."""
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """What a transformers language model computes for the very tokens that it is given."""
    return model(input_ids=tokens, labels=tokens).loss
