"""Which attention kernel CUDA would choose, and softmax as CUDA's kernels take it, for the virtual accelerator."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memopt.planning.autocast_rules import cast

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def attention_as_on_cuda(device_type: str) -> Iterator[None]:
    """`scaled_dot_product_attention` on this device follows torch's order on CUDA: flash, memory-efficient, math.

    Source: `priority_order` and `can_use_*` of torch's sdp_utils.cpp. A function mode would be off inside backward,
    where checkpointed regions run again, so the function itself is replaced.
    """
    plain = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _attention(plain, device_type)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def _attention(plain: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
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
        kernel = _kernel(query, key, value, attn_mask) if query.device.type == device_type else None
        if kernel is None:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        return kernel(query, key, value, attn_mask, dropout_p, is_causal, scale)

    return attention


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Callable[..., Tensor] | None:
    """None stands for the math path."""
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if not (query.dim() == key.dim() == value.dim() == 4):
        return None
    flash = torch.backends.cuda.flash_sdp_enabled() and mask is None and query.dtype in _HALVES  # type: ignore[no-untyped-call]
    if flash and same_width and query.shape[-1] <= 256:
        return _flash
    if torch.backends.cuda.mem_efficient_sdp_enabled() and query.dtype in (*_HALVES, torch.float32):  # type: ignore[no-untyped-call]
        return _memory_efficient
    return None


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
    if key.shape[-3] != query.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    bias = None if mask is None else _bias(mask, query, key)
    return _aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
    )[0]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the kernel takes it: additive, last dimension padded to 16, and expanded without memory."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
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
