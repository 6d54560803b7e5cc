"""Which attention kernel torch 2.11 chooses on CUDA, and softmax as CUDA's kernels take it.

Source: `priority_order` and `can_use_*` of torch's sdp_utils.cpp; the tests compare them with torch's own answers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_memopt.planning.simulation import DEVICE_TYPE
from hf_memopt.planning.simulation.kernels.autocast import cast

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_FLASH_WIDTH = 256
# cuDNN's kernel is preferred on these generations of cards.
_CUDNN_WIDTHS = {9: 256, 10: 128}


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of `scaled_dot_product_attention`; the tensors `(batch, heads, length, width)`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def choose_kernel(call: AttentionCall, capability: tuple[int, int]) -> str:
    backends = torch.backends.cuda
    if not _is_regular(call):
        return "math"
    if backends.cudnn_sdp_enabled() and _suits_cudnn(call, capability):  # type: ignore[no-untyped-call]
        return "cudnn"
    if backends.flash_sdp_enabled() and _suits_flash(call, capability):  # type: ignore[no-untyped-call]
        return "flash"
    efficient = backends.mem_efficient_sdp_enabled() and _suits_efficient(call, capability)  # type: ignore[no-untyped-call]
    return "efficient" if efficient else "math"


def _is_regular(call: AttentionCall) -> bool:
    operands = (call.query, call.key, call.value)
    if any(t.dim() != 4 or t.stride(-1) != 1 or t.shape[-2] == 0 for t in operands):
        return False
    (query_heads, key_heads, value_heads) = (t.shape[1] for t in operands)
    heads_match = query_heads == key_heads or (call.enable_gqa and query_heads % key_heads == 0)
    return heads_match and key_heads == value_heads and len({t.shape[0] for t in operands}) == 1


def _suits_cudnn(call: AttentionCall, capability: tuple[int, int]) -> bool:
    widest = _CUDNN_WIDTHS.get(capability[0], 0)
    widths = (call.query.shape[-1], call.value.shape[-1])
    if call.query.dtype not in _HALVES or any(width % 8 or width > widest for width in widths):
        return False
    if call.attn_mask is not None and call.attn_mask.requires_grad:
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    return call.key.shape[-2] != 1 and not (call.dropout_p and call.query.shape[-2] == 1)


def _suits_flash(call: AttentionCall, capability: tuple[int, int]) -> bool:
    width = call.query.shape[-1]
    if capability < (8, 0) or call.query.dtype not in _HALVES or call.attn_mask is not None or width > _FLASH_WIDTH:
        return False
    if not (width == call.key.shape[-1] == call.value.shape[-1]):
        return False
    if call.is_causal and call.query.shape[-2] != call.key.shape[-2]:
        return False
    # These cards have less shared memory, which backward runs out of.
    is_small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    return not (is_small and call.needs_grad and (192 < width <= 224 or (width > 224 and call.dropout_p)))


def _suits_efficient(call: AttentionCall, capability: tuple[int, int]) -> bool:
    is_half = call.query.dtype in _HALVES
    if call.query.dtype == torch.bfloat16 and capability < (8, 0):
        return False
    if not is_half and call.query.dtype != torch.float32:
        return False
    alignment = 8 if is_half else 4 if capability >= (8, 0) else 1
    is_aligned = call.query.shape[-1] % alignment == 0 and call.value.shape[-1] % alignment == 0
    return is_aligned and call.query.shape[1] == call.key.shape[1] and call.query.shape[-1] == call.key.shape[-1]


def attention_as_on_cuda(capability: tuple[int, int]) -> Any:
    """Make `scaled_dot_product_attention` run the kernel that torch would choose on a card of this capability.

    A function mode would be off inside backward, where checkpointed regions run again, so the function is replaced.
    """
    plain = F.scaled_dot_product_attention

    def attention(*args: Any, **options: Any) -> Tensor:
        call = AttentionCall(*args, **options)
        if call.query.device.type != DEVICE_TYPE:
            return plain(*args, **options)
        if torch.is_autocast_enabled(DEVICE_TYPE):
            dtype = torch.get_autocast_dtype(DEVICE_TYPE)
            query, key, value, mask = cast((call.query, call.key, call.value, call.attn_mask), dtype)
            call = replace(call, query=query, key=key, value=value, attn_mask=mask)
        kernel = _KERNELS.get(choose_kernel(call, capability))
        if kernel is None:
            return plain(**vars(call))
        return kernel(call, 1 / math.sqrt(call.query.shape[-1]) if call.scale is None else call.scale)

    return patch.object(F, "scaled_dot_product_attention", attention)


def _cudnn(call: AttentionCall, scale: float) -> Tensor:
    bias = None if call.attn_mask is None else _additive(call.attn_mask, call.query)
    return _aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
        call.query, call.key, call.value, bias, call.needs_grad, call.dropout_p, call.is_causal, False, scale=scale
    )[0]


def _flash(call: AttentionCall, scale: float) -> Tensor:
    operands = [call.query, call.key, call.value]
    width = call.query.shape[-1]
    padding = -width % 8
    if padding:
        operands = [F.pad(each, (0, padding)) for each in operands]
    kernel = _aten._scaled_dot_product_flash_attention
    attended: Tensor = kernel(*operands, call.dropout_p, call.is_causal, False, scale=scale)[0]
    return attended[..., :width] if padding else attended


def _memory_efficient(call: AttentionCall, scale: float) -> Tensor:
    bias = None if call.attn_mask is None else _bias(call.attn_mask, call.query, call.key)
    return _aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        call.query, call.key, call.value, bias, call.needs_grad, call.dropout_p, call.is_causal, scale=scale
    )[0]


# All but the math path, which is torch's own.
_KERNELS = {"cudnn": _cudnn, "flash": _flash, "efficient": _memory_efficient}


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask as the kernel takes it: additive, last dimension padded to 16, and expanded without memory."""
    mask = _additive(mask, query)
    num_keys = mask.shape[-1]
    if num_keys % 16:
        mask = F.pad(mask, (0, -num_keys % 16))[..., :num_keys]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def register_softmax() -> list[torch.library.Library]:
    """Register CUDA's softmax, which reads float16 and writes float32 in one kernel, and converts bfloat16 first.

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
