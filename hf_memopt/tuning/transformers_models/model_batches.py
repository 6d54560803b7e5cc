"""Batches as a transformers model of a task takes them: zeros, in the sizes that its configuration says."""

from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]


def token_batch(config: Any, num_samples: int, seq_len: int) -> Batch:
    """Return tokens without padding, which are their own labels: `(num_samples, seq_len)`."""
    tokens = torch.zeros(num_samples, seq_len, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def image_batch(config: Any, num_samples: int, seq_len: int) -> Batch:
    """Return images of the configuration's size, `(num_samples, channels, height, width)`, and a class for each."""
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    pixels = torch.zeros(num_samples, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": pixels, "labels": torch.zeros(num_samples, dtype=torch.long)}
