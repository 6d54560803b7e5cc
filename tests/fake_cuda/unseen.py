"""Hides the GPU from modules that are imported after this one, until the process is forked.

Some libraries, such as torchao, ask for GPUs when they are imported. CUDA counts as started then, and no forked process
could use CUDA.
"""

import os

import torch
from torch.utils._triton import has_triton

_is_available, _device_count = torch.cuda.is_available, torch.cuda.device_count


def _see() -> None:
    torch.cuda.is_available, torch.cuda.device_count = _is_available, _device_count
    has_triton.cache_clear()


torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0
os.register_at_fork(after_in_child=_see)
