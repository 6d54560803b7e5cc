"""Parameters whose bytes are away: an operation on one is seen before it reads, and brings the bytes or raises.

While its bytes are away, a parameter has another class, derived from its own, with `__torch_function__`. So torch
hands each function that gets it to the object by which it streams. Functions of other tensors run as ever. Views that
others hold, and nodes of autograd, do not come this way: their storage is closed (`transfer/storage_memory.py`).
"""

from collections.abc import Iterable
from functools import cache
from types import GetSetDescriptorType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hf_memopt.autograd_state import COMES_AND_GOES
from hf_memopt.uncompiled import graph_break, uncompiled


class Reader(Protocol):
    """The object by which parameters stream, which they have as their attribute `COMES_AND_GOES`."""

    def read(self, function: Any, args: Any, kwargs: Any, parameters: list[Tensor]) -> Any:
        """Return the result of a function that reads or writes parameters whose bytes are away."""

    def refuse_copy(self, parameter: Tensor) -> None:
        """Raise the error for a parameter that is being copied or pickled while its bytes are away."""


class Away:
    """The part of such a class that is not the parameter's own."""

    __slots__ = ()

    @classmethod
    @graph_break
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _without_bytes():
            return without_reading(func, args, kwargs)
        found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Away)]
        away: Any = [each for each in found if COMES_AND_GOES in vars(each)]
        if not away:  # views, to which a subclass of tensors has handed its class down
            set_present(found)  # type: ignore[arg-type]
            return func(*args, **kwargs)
        reader: Reader = getattr(away[0], COMES_AND_GOES)
        return reader.read(func, args, kwargs, away)

    def __deepcopy__(self, memo: Any) -> None:
        getattr(self, COMES_AND_GOES).refuse_copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        getattr(self, COMES_AND_GOES).refuse_copy(self)


def set_away(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if not isinstance(parameter, Away):
            parameter.__class__ = _away_class(type(parameter))


def set_present(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if isinstance(parameter, Away):
            parameter.__class__ = type(parameter).__bases__[1]


def without_reading(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on parameters that are away; an access to their bytes raises an error that names the weight."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


@cache
def _away_class(kind: Any) -> Any:
    return type(kind)(kind.__name__, (Away, kind), {"__slots__": (), "__module__": kind.__module__})


@cache
def is_alias(function: Any) -> bool:
    """Return whether a function makes another tensor on the same memory, or a copy that raises by itself."""
    data: Any = Tensor.data
    return function in {
        data.__get__,
        *(getattr(Tensor, name) for name in ("detach", "to", "cuda", "cpu", "half", "bfloat16", "float", "double")),
        Tensor.type,
    }


_WITH_BYTES = ("data", "T", "mT", "H", "mH", "real", "imag")
_METHODS = (
    "size stride dim ndimension numel nelement element_size storage_offset untyped_storage is_contiguous get_device "
    "is_floating_point is_complex is_signed is_conj is_neg is_inference requires_grad_ has_names is_same_size __len__ "
    "__hash__ register_hook register_post_accumulate_grad_hook dense_dim sparse_dim is_distributed"
)
_FUNCTIONS = "is_floating_point is_complex numel is_tensor is_inference is_same_size is_conj is_neg is_signed"


@cache
def _without_bytes() -> frozenset[Any]:
    """Return the functions of tensors that neither read nor write their bytes."""
    data: Any = Tensor.data
    found: set[Any] = {data.__set__, torch._has_compatible_shallow_copy_type}
    found |= {getattr(Tensor, name) for name in _METHODS.split()} | {
        getattr(torch, name) for name in _FUNCTIONS.split()
    }
    for kind in (torch._C.TensorBase, Tensor):
        for name, attribute in vars(kind).items():
            if isinstance(attribute, GetSetDescriptorType | property) and name not in _WITH_BYTES:
                found |= {attribute.__get__, attribute.__set__}
    return frozenset(found)
