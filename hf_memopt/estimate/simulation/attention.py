"""Which attention kernel CUDA would choose, and softmax as CUDA's kernels take it, for the virtual accelerator."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memopt.estimate.simulation.attention_kernels import Call, choose
from hf_memopt.estimate.simulation.autocast import cast

_aten = torch.ops.aten


@contextmanager
def attention_as_on_cuda(device_type: str, capability: tuple[int, int]) -> Iterator[None]:
    """`scaled_dot_product_attention` on this device runs what torch would choose on a card of this compute capability.

    A function mode would be off inside backward, where checkpointed regions run again, so the function itself is
    replaced.
    """
    plain = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attention(plain, device_type, capability)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def _attention(plain: Callable[..., Tensor], device_type: str, capability: tuple[int, int]) -> Callable[..., Tensor]:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.device.type == device_type and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            query, key, value, attn_mask = (cast(each, dtype, device_type) for each in (query, key, value, attn_mask))
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        kernel = _KERNELS.get(choose(call, capability)) if query.device.type == device_type else None
        if kernel is None:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        return kernel(query, key, value, attn_mask, dropout_p, is_causal, scale)

    return attention


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    bias = None if mask is None else _additive(mask, query)
    return _aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
        query, key, value, bias, _needs_grad(query, key, value), dropout_p, is_causal, False, scale=scale
    )[0]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    width = query.shape[-1]
    padding = -width % 8
    if padding:
        query, key, value = (F.pad(each, (0, padding)) for each in (query, key, value))
    attended = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return attended[..., :width] if padding else attended  # type: ignore[no-any-return]


def _memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    bias = None if mask is None else _bias(mask, query, key)
    return _aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, bias, _needs_grad(query, key, value), dropout_p, is_causal, scale=scale
    )[0]


# All but the math path, which is torch's own.
_KERNELS: dict[str, Callable[..., Tensor]] = {"cudnn": _cudnn, "flash": _flash, "efficient": _memory_efficient}


def _needs_grad(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(each.requires_grad for each in operands)


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the kernel takes it: additive, last dimension padded to 16, and expanded without memory."""
    mask = _additive(mask, query)
    num_keys = mask.shape[-1]
    if num_keys % 16:
        mask = F.pad(mask, (0, -num_keys % 16))[..., :num_keys]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def register_softmax() -> list[torch.library.Library]:
    """CUDA's softmax reads float16 and writes float32 in one kernel; bfloat16, and all elsewhere, is converted first.

    Source: `softmax` and `log_softmax` of torch's SoftMax.cpp.
    """
    rules = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")  # type: ignore[no-untyped-call]
    for name, kernel in (("softmax.int", _aten._softmax), ("log_softmax.int", _aten._log_softmax)):
        rules.impl(name, _softmax(kernel.default))  # type: ignore[no-untyped-call]
    return [rules]


def _softmax(kernel: Any) -> Callable[..., Tensor]:
    def run(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if dtype == torch.float32 and input.dtype == torch.float16:
            return kernel(input, dim, True)  # type: ignore[no-any-return]
        return kernel(input if dtype is None else input.to(dtype), dim, False)  # type: ignore[no-any-return]

    return run
