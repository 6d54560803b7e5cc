"""Workspaces that cuBLAS and cuBLASLt take from torch's allocator, and keep.

Source: CublasHandlePool.cpp and Blas.cpp of torch 2.11. Each thread that computes has a handle of its own: the one that
runs forward and the optimizer, and autograd's, which runs backward and what is recomputed there. A handle takes its
workspace when its first product runs, cuBLASLt's when the first one that adds a bias does.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_memopt.autograd_state import in_backward
from hf_memopt.estimate.gpus import cublas_workspace_bytes
from hf_memopt.units import MIB

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm,
    _aten.addmm,
    _aten._addmm_activation,
    _aten.bmm,
    _aten.baddbmm,
    _aten.mv,
    _aten.addmv,
    _aten.dot,
    _aten._scaled_mm,
    _aten._int_mm,
}
_WITH_BIAS = {_aten.addmm, _aten._addmm_activation}
# `parseCUDABlasLtWorkspaceSize` without the environment's say.
_LT_WORKSPACE_BYTES = MIB


class LibraryWorkspaces:
    """Says when which library takes a workspace.

    Args:
        compute_capability: of the card.
    """

    def __init__(self, compute_capability: tuple[int, int]) -> None:
        self._cublas_bytes = cublas_workspace_bytes(compute_capability)
        self._taken: set[tuple[str, bool]] = set()

    def taken_by(self, function: Any, args: Any) -> Iterator[tuple[str, int]]:
        """Yield the libraries that take a workspace for an operation on the device, each with its bytes."""
        if function.overloadpacket not in _PRODUCTS:
            return
        libraries = {"cuBLAS": self._cublas_bytes}
        if function.overloadpacket in _WITH_BIAS and _adds_a_bias(*args[:3]):
            libraries["cuBLASLt"] = _LT_WORKSPACE_BYTES
        for library, num_bytes in libraries.items():
            handle = library, in_backward()
            if handle not in self._taken:
                self._taken.add(handle)
                yield library, num_bytes


def _adds_a_bias(bias: Tensor, left: Tensor, right: Tensor) -> bool:
    """Return whether `addmm` runs cuBLASLt: one number for each column, and no side of length 1."""
    is_row: bool = bias.dim() == 1 and bias.is_contiguous() and bias.shape[0] == right.shape[1]
    return is_row and min(*left.shape, *right.shape) > 1
