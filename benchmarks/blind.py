"""The first import of a server that forks: hides GPUs from all later imports, and shows them to forked processes.

Packages query GPUs on import: torchao, which transformers imports, asks for the capability of each. Such a query starts
CUDA, or marks it as started where the driver's management library cannot count GPUs, and then no forked process can use
it.
"""

import os

import torch
from torch.utils._triton import has_triton

_is_available, _device_count = torch.cuda.is_available, torch.cuda.device_count
torch.cuda.is_available, torch.cuda.device_count = lambda: False, lambda: 0


def see() -> None:
    """Make GPUs visible again."""
    torch.cuda.is_available, torch.cuda.device_count = _is_available, _device_count
    has_triton.cache_clear()


os.register_at_fork(after_in_child=see)
