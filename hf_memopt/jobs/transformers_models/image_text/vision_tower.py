"""The part of a vision-language model that sees."""

from typing import Any

from torch import nn


def freeze_vision_tower(model: Any) -> str:
    """Freeze the vision tower of a transformers model, and return its name in the model."""
    tower: nn.Module = model.get_encoder(modality="image")
    tower.requires_grad_(False)
    name: str = next(name for name, module in model.named_modules() if module is tower)
    return name
