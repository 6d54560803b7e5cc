"""Hides the GPU from later imports until a fork: libraries such as torchao ask for GPUs, and end CUDA for forks."""

import os

import torch
from torch.utils._triton import has_triton

_is_available, _device_count = torch.cuda.is_available, torch.cuda.device_count


def _see() -> None:
    torch.cuda.is_available, torch.cuda.device_count = _is_available, _device_count
    has_triton.cache_clear()


torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0
os.register_at_fork(after_in_child=_see)
