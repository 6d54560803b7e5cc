"""Which attention kernel torch 2.11 chooses on CUDA.

Source: `priority_order` and `can_use_*` of torch's sdp_utils.cpp. The tests compare it with what torch itself answers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)
_FLASH_WIDTH = 256
# Of cuDNN's kernel, which is preferred on these generations of cards.
_CUDNN_WIDTHS = {9: 256, 10: 128}


@dataclass(frozen=True)
class Call:
    """Arguments of `scaled_dot_product_attention`; the tensors `(batch, heads, length, width)`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool

    @property
    def needs_grad(self) -> bool:
        """Whether the kernel has to keep what backward needs."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def choose(call: Call, capability: tuple[int, int]) -> str:
    """The kernel: "cudnn", "flash", "efficient" or "math".

    Args:
        call: what is to be computed.
        capability: the card's compute capability, such as `(8, 6)`.
    """
    backends = torch.backends.cuda
    if not _is_regular(call):
        return "math"
    if backends.cudnn_sdp_enabled() and _suits_cudnn(call, capability):  # type: ignore[no-untyped-call]
        return "cudnn"
    if backends.flash_sdp_enabled() and _suits_flash(call, capability):  # type: ignore[no-untyped-call]
        return "flash"
    efficient = backends.mem_efficient_sdp_enabled() and _suits_efficient(call, capability)  # type: ignore[no-untyped-call]
    return "efficient" if efficient else "math"


def _is_regular(call: Call) -> bool:
    """What all kernels but the math path ask for."""
    operands = (call.query, call.key, call.value)
    if any(t.dim() != 4 or t.stride(-1) != 1 or t.shape[-2] == 0 for t in operands):
        return False
    (query_heads, key_heads, value_heads) = (t.shape[1] for t in operands)
    heads_match = query_heads == key_heads or (call.enable_gqa and query_heads % key_heads == 0)
    return heads_match and key_heads == value_heads and len({t.shape[0] for t in operands}) == 1


def _suits_cudnn(call: Call, capability: tuple[int, int]) -> bool:
    widest = _CUDNN_WIDTHS.get(capability[0], 0)
    widths = (call.query.shape[-1], call.value.shape[-1])
    if call.query.dtype not in _HALVES or any(width % 8 or width > widest for width in widths):
        return False
    if call.mask is not None and call.mask.requires_grad:
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    return call.key.shape[-2] != 1 and not (call.dropout_p and call.query.shape[-2] == 1)


def _suits_flash(call: Call, capability: tuple[int, int]) -> bool:
    width = call.query.shape[-1]
    if capability < (8, 0) or call.query.dtype not in _HALVES or call.mask is not None or width > _FLASH_WIDTH:
        return False
    if not (width == call.key.shape[-1] == call.value.shape[-1]):
        return False
    if call.is_causal and call.query.shape[-2] != call.key.shape[-2]:
        return False
    # These cards have less shared memory, which backward runs out of.
    is_small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    return not (is_small and call.needs_grad and (192 < width <= 224 or (width > 224 and call.dropout_p)))


def _suits_efficient(call: Call, capability: tuple[int, int]) -> bool:
    is_half = call.query.dtype in _HALVES
    if call.query.dtype == torch.bfloat16 and capability < (8, 0):
        return False
    if not is_half and call.query.dtype != torch.float32:
        return False
    alignment = 8 if is_half else 4 if capability >= (8, 0) else 1
    is_aligned = call.query.shape[-1] % alignment == 0 and call.value.shape[-1] % alignment == 0
    return is_aligned and call.query.shape[1] == call.key.shape[1] and call.query.shape[-1] == call.key.shape[-1]
