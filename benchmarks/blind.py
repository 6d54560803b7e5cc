"""Imported first by the server of cells: what it imports afterwards finds no GPU.

Packages ask for GPUs when they are imported: torchao, which transformers imports, for the capability of each. That
starts CUDA, or marks it as started where the driver's management library cannot count them, and then no forked process
can use it.
"""

import torch
from torch.utils._triton import has_triton

_is_available, _device_count = torch.cuda.is_available, torch.cuda.device_count
torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0


def see() -> None:
    """In a cell's process: find the GPU again."""
    torch.cuda.is_available, torch.cuda.device_count = _is_available, _device_count
    has_triton.cache_clear()
