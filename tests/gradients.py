"""Gradients, taken off a model and compared to the bit."""

import torch
from torch import Tensor, nn


def take_gradients(model: nn.Module) -> list[Tensor]:
    """Return copies, and clear the model's own."""
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    """Return whether there are as many and all are the same."""
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of a transformers language model for its input tokens."""
    return model(input_ids=tokens, labels=tokens).loss
