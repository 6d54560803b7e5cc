"""TRL's Triton kernels, for a device that is simulated: they write in place and take no memory.

Without a GPU TRL computes the same with operations of torch, whose results do take memory. Source: `trl.kernels` of TRL
1.16.
"""

import sys
from typing import Any

import torch
from torch import Tensor

_KERNELS = "trl.kernels.chunked_logprob"
_USERS = (_KERNELS, "trl.trainer.utils")


def run_as_on_cuda() -> None:
    """Let the fused loss of TRL, if this process has imported it, do what it does on CUDA; for good."""
    kernels: Any = sys.modules.get(_KERNELS)
    if kernels is None:
        return
    for name in _USERS:
        if name in sys.modules:
            sys.modules[name]._use_triton = lambda device: True  # type: ignore[attr-defined]
    kernels._forward_kernel = kernels._backward_kernel = _Kernel()
    kernels._addmm_fp32 = _add_product


class _Kernel:
    """Launched as Triton's are: `kernel[grid](arguments)`."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Take the product's time and no memory: cuBLAS adds halves to a float32 in place, which torch cannot fake."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        torch.mm(left, right, out=total.view(left.dtype)[:, : total.shape[1]])
