"""TRL's fused output layer as it runs on CUDA, where Triton kernels work in place.

Elsewhere TRL folds the tiles of logits with torch's operations, which take memory of their own, and scores every
position. Source: `ChunkedLogProbFunction` and `add_fused_lm_head` of TRL 1.16.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def fused_head_as_on_cuda() -> Iterator[None]:
    """Have TRL's fused output layer take as much memory as on CUDA, if TRL has been imported."""
    kernels, caller = (sys.modules.get(name) for name in ("trl.kernels.chunked_logprob", "trl.trainer.utils"))
    with ExitStack() as stack:
        if kernels is not None:
            stack.enter_context(patch.object(kernels, "_forward_tile", _fold))
            stack.enter_context(patch.object(kernels, "_backward_tile", _fold))
            stack.enter_context(patch.object(kernels, "_addmm_fp32", _add_product))
        if caller is not None and hasattr(caller, "_use_triton"):
            stack.enter_context(patch.object(caller, "_use_triton", lambda device: True))
        yield


def _fold(tile: Tensor, *others: Any, **settings: Any) -> None:
    """Touch the tile, and make nothing."""
    tile.zero_()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Multiply without memory for the product, which is added in float32: it lies where the sum does."""
    torch.mm(left, right, out=total.view(left.dtype)[:, : right.shape[1]])
