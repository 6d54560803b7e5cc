"""CUDA's autocast policy for the virtual accelerator, by torch's "Autocast Op Reference".

A canary test compares the lists with torch's registrations for CUDA. Operations that CUDA registers and these lists
leave out have no overload that Python can reach, or are banned there too.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_memopt.planning.accounting.operation import named_arguments
from hf_memopt.planning.simulation import DEVICE_TYPE

_aten = torch.ops.aten
_REGISTERED = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER_PRECISION = _names("""
_convolution _convolution.deprecated _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell
addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding
conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution einsum gru_cell linalg_multi_dot
linalg_vecdot linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
""")
FLOAT32 = _names("""
_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity
dist erfinv exp expm1 frobenius_norm.dim group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log log10
log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss
nll_loss2d nuclear_norm nuclear_norm.dim pdist poisson_nll_loss pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d
upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
""")
FLOAT32_BY_ARGUMENT = _names("""
cumprod cumsum linalg_vector_norm log_softmax.int prod prod.dim_int softmax.int sum sum.dim_IntList
""")
# torch 2.15 lists these; before, they ran in the dtype of their input.
FLOAT32 += tuple(name for name in ("linalg_matrix_sqrth", "rms_norm") if f"aten::{name}" in _REGISTERED)
WIDEST = _names("""
addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
""")

_HALVES = (torch.float16, torch.bfloat16)
_KEY = "AutocastPrivateUse1"
_EXCLUDED = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]


def register() -> list[torch.library.Library]:
    """Give the simulated device CUDA's policy, for as long as the returned libraries live."""
    fallthrough = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    fallthrough.fallback(torch.library.fallthrough_kernel, _KEY)  # type: ignore[no-untyped-call]
    rules = torch.library.Library("aten", "IMPL", _KEY)  # type: ignore[no-untyped-call]
    policies = ((LOWER_PRECISION, _lower), (FLOAT32, _float32), (FLOAT32_BY_ARGUMENT, _by_argument), (WIDEST, _widest))
    for names, policy in policies:
        for name in names:
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(_aten, packet), overload or "default")
            rules.impl(name, _kernel(operation, policy))  # type: ignore[no-untyped-call]
    return [fallthrough, rules]


@contextmanager
def shared_casts() -> Iterator[None]:
    """Cast weights once until torch clears its own cache, when autocast's outermost context ends."""
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        _cast_weights.clear()
        clear()

    with patch.object(torch, "clear_autocast_cache", clear_both):
        try:
            yield
        finally:
            _cast_weights.clear()


# By id of a weight, which may die and leave its id to another: hence the reference.
_cast_weights: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast as torch's cached_cast does: floats of the device, but float64, to dtype; fp32 weights only once.

    torch's `tree_map` took a twentieth of a simulation; operators take nothing deeper than lists.
    """
    if isinstance(value, list | tuple):
        return [cast(each, dtype) for each in value]
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.device.type != DEVICE_TYPE:
        return value
    if value.dtype in (dtype, torch.float64):
        return value
    is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
    if not (is_weight and dtype in _HALVES and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    reference, copy = _cast_weights.get(id(value), (None, value))
    if reference is None or reference() is not value or copy.dtype != dtype:
        with torch.enable_grad():  # as in cached_cast: the copy may serve a graph later
            copy = value.to(dtype)
        _cast_weights[id(value)] = (weakref.ref(value), copy)
    return copy


def _kernel(operation: Any, policy: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            args, kwargs = policy(operation, args, kwargs)
            return operation(*args, **kwargs)

    return run


def _lower(operation: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _cast_all(args, kwargs, torch.get_autocast_dtype(DEVICE_TYPE))


def _float32(operation: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _cast_all(args, kwargs, torch.float32)


def _widest(operation: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    floats = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    has_float32 = any(leaf.dtype == torch.float32 for leaf in floats)
    return (_float32 if has_float32 else _lower)(operation, args, kwargs)


def _by_argument(operation: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Pass the input unchanged, and request a float32 result unless the caller named a dtype."""
    if args[0].dtype not in _HALVES:
        return args, kwargs
    given = named_arguments(operation, args, kwargs)
    if given.get("dtype") is None:
        given["dtype"] = torch.float32
    return (), given


def _cast_all(args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    return cast(args, dtype), {name: cast(value, dtype) for name, value in kwargs.items()}
