"""An operation that has run, the tensors in it, and the memory that its kernels take beside its results.

cuBLAS and cuBLASLt take workspaces, and keep them (CublasHandlePool.cpp and Blas.cpp of torch 2.11): one for the thread
of forward and optimizer, one for autograd's, when the first product runs there, cuBLASLt's when the first one with a
bias does. Softmax's backward makes the product of gradient and result, and drops it (`softmax_backward_cuda_out` of
SoftMax.cu); CTC's backward makes a second table like forward's (`ctc_loss_backward_gpu_template` of LossCTC.cu).
`masked_scatter` counts its mask's elements in front of each one, in 8 bytes each, and makes an expanded mask whole, in
one (`masked_scatter__cuda` of IndexKernel.cpp, `launch_masked_scatter_kernel` of IndexKernel.cu).
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_memopt.autograd_state import in_backward, unwrapped
from hf_memopt.planning.cards.gpus import cublas_workspace_bytes
from hf_memopt.units import MIB
from hf_memopt.weights.gradients import AwayGradient

_aten = torch.ops.aten
_WITH_BIAS = {_aten.addmm, _aten._addmm_activation}
_OF_VECTORS = {_aten.mv, _aten.addmv, _aten.dot}
_PRODUCTS = _WITH_BIAS | _OF_VECTORS | {_aten.mm, _aten.bmm, _aten.baddbmm, _aten._scaled_mm, _aten._int_mm}
_SCATTERS = {_aten.masked_scatter, _aten.masked_scatter_}
# `parseCUDABlasLtWorkspaceSize` without the environment's say.
_LT_WORKSPACE_BYTES = MIB


class Operation(NamedTuple):
    function: Any
    args: Any
    kwargs: Any
    result: Any
    inputs: list[Tensor]
    outputs: list[Tensor]

    @classmethod
    def of(cls, function: Any, args: Any, kwargs: Any, result: Any) -> "Operation":
        return cls(function, args, kwargs, result, tensors_in((args, kwargs)), tensors_in(result))


def tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    # The most frequent first.
    if type(value) is FakeTensor:
        found.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Tensor) and not isinstance(value, AwayGradient):  # a wrapper, without memory
        found += unwrapped(value)  # the tensors with memory: quantised optimizer states, say, consist of others
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def device_kind(tensor: Tensor) -> str:
    """Return the type of a device without an operation, which `device` of a fake tensor would be."""
    device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device
    return str(device.type)


def named_arguments(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = (argument.name for argument in function._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


@cache
def name_of(function: Any) -> str:
    return str(function)


class KernelMemory:
    def __init__(self, compute_capability: tuple[int, int]) -> None:
        self._cublas_bytes = cublas_workspace_bytes(compute_capability)
        self._taken: set[tuple[str, bool]] = set()

    def taken_by(self, operation: Operation) -> Iterator[tuple[str, int, bool]]:
        """Yield owner and bytes of each block, and whether it stays for ever; the others go when the operation ends."""
        packet, args = operation.function.overloadpacket, operation.args
        if packet is _aten._softmax_backward_data:
            yield "softmax's backward", args[0].nbytes, False
        if packet is _aten._ctc_loss_backward:
            yield "CTC's backward", args[6].nbytes, False
        if packet in _SCATTERS:
            mask, result = args[1], operation.outputs[0]
            is_whole = mask.shape == result.shape and mask.is_contiguous()
            yield "masked_scatter's prefix sum", (8 if is_whole else 9) * result.numel(), False
        if packet not in _PRODUCTS:
            return
        libraries = {"cuBLAS": self._cublas_bytes}
        if packet in _WITH_BIAS and _adds_a_bias(*args[:3]):
            libraries["cuBLASLt"] = _LT_WORKSPACE_BYTES
        for library, num_bytes in libraries.items():
            handle = library, in_backward()
            if handle not in self._taken:
                self._taken.add(handle)
                yield library, num_bytes, True


def _adds_a_bias(bias: Tensor, left: Tensor, right: Tensor) -> bool:
    """Return whether `addmm` runs cuBLASLt: one number for each column, and no side of length 1."""
    is_row: bool = bias.dim() == 1 and bias.is_contiguous() and bias.shape[0] == right.shape[1]
    return is_row and min(*left.shape, *right.shape) > 1
