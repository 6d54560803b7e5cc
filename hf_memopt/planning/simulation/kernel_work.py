"""The work of an operation on a card: arithmetic of a kind, and bytes of its memory."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hf_memopt.planning.accounting.operation import Operation
from hf_memopt.planning.cards.gpus import Card

MATRIX, CONVOLUTION, ATTENTION, MEMORY = "matrix", "convolution", "attention", "memory"
HALF, TF32, FLOAT32 = "half", "tf32", "float32"

_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "set_", "_unsafe_view", "resize_"}
_AMPERE = (8, 0)


class KernelWork(NamedTuple):
    """The work of a kernel; `MEMORY` is all that is no arithmetic worth counting, `num_bytes` are read and written."""

    kind: str
    precision: str
    flops: float
    num_bytes: int


@cache
def starts_kernel(function: Any) -> bool:
    return not function.is_view and function.overloadpacket.__name__ not in _NO_KERNEL


def work_of(operation: Operation, card: Card) -> KernelWork:
    num_bytes = sum(leaf.nbytes for leaf in operation.inputs) + sum(leaf.nbytes for leaf in operation.outputs)
    flops = _flops(*operation[:4])
    kind = _kind(operation.function.overloadpacket.__name__) if flops else MEMORY
    return KernelWork(kind, _precision(kind, {leaf.dtype for leaf in operation.inputs}, card), flops, num_bytes)


def flops_per_s(work: KernelWork, card: Card) -> float:
    """Return the data sheet's speed. TF32 is half as fast as half precision."""
    if work.precision == FLOAT32:
        return card.float32_flops
    return card.half_flops if work.precision == HALF else card.half_flops / 2


def _kind(operation: str) -> str:
    if "_attention" in operation:
        return ATTENTION
    return CONVOLUTION if "convolution" in operation else MATRIX


def _precision(kind: str, dtypes: set[torch.dtype], card: Card) -> str:
    """Tensor cores take bfloat16 and TF32 from Ampere on; torch allows TF32 to convolutions, and else if it is told.

    Products of whole numbers in 8 bits are taken to be as fast as those of float16.
    """
    is_ampere = card.compute_capability >= _AMPERE
    if dtypes & {torch.float16, torch.int8} or (torch.bfloat16 in dtypes and is_ampere):
        return HALF
    allowed = (
        torch.backends.cudnn.allow_tf32 if kind == CONVOLUTION else torch.get_float32_matmul_precision() != "highest"
    )
    return TF32 if is_ampere and allowed and torch.bfloat16 not in dtypes else FLOAT32


def _flops(function: Any, args: Any, kwargs: Any, result: Any) -> float:
    if "_attention" in function.overloadpacket.__name__:
        return _attention_flops(function.overloadpacket.__name__.endswith("_backward"), args)
    if function.overloadpacket is torch.ops.aten.convolution_backward:
        return _convolution_backward_flops(*args)
    aten = torch.ops.aten
    count = flop_registry.get(aten.mm if function.overloadpacket is aten._int_mm else function.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def _convolution_backward_flops(output: Tensor, input: Tensor, weight: Tensor, *settings: Any) -> float:
    """torch's own count takes grouped convolutions for dense ones. Each gradient costs as much as the forward pass."""
    transposed, mask = settings[4], settings[7]
    products = (input if transposed else output).numel() * weight[0].numel()
    return 2.0 * products * int(mask[0] + mask[1])


def _attention_flops(is_backward: bool, args: Any) -> float:
    """torch's own count refuses fewer key heads than query heads. Backward has five products, forward two."""
    query, key = args[1:3] if is_backward else args[:2]
    product: float = 2.0 * query.numel() * key.shape[-2]
    return product * (5 if is_backward else 2)
