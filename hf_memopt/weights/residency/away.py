"""The classes of parameters whose bytes come and go.

While its bytes are away, a parameter has a class derived from its own, with `__torch_function__`. So torch hands each
function that gets it to its attribute `COMES_AND_GOES`, a `Visiting`, which brings the bytes or raises. Functions of
other tensors run as ever. Views that others hold, and nodes of autograd, do not come this way: their storage is closed
(`transfer/storage_memory.py`).

While its bytes are there, it is a `WatchedParameter`, whose writes are counted.
"""

import sys
from collections.abc import Iterable
from functools import cache
from inspect import signature
from types import GetSetDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves

from hf_memopt.autograd_state import COMES_AND_GOES, PARAMETER_TYPES
from hf_memopt.uncompiled import graph_break, uncompiled

_NEW_PARAMETER = nn.Parameter.__new__.__code__


class Away:
    """The part of the class of a parameter that is away which is not the parameter's own."""

    __slots__ = ()

    @classmethod
    @graph_break
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _without_bytes():
            return call_unseen(func, args, kwargs)
        if func in (torch.autograd.grad, torch.autograd.backward):
            return _by_edges(func, args, kwargs)
        found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Away)]
        away: Any = [each for each in found if COMES_AND_GOES in vars(each)]
        if not away:  # views, to which a subclass of tensors has handed its class down
            set_plain(map(Classes.of, found))  # type: ignore[arg-type]
            return func(*args, **kwargs)
        return getattr(away[0], COMES_AND_GOES).read(func, args, kwargs, away)

    def __deepcopy__(self: Any, memo: Any) -> Any:
        getattr(self, COMES_AND_GOES).bring_to_copy(self)
        return self.__deepcopy__(memo)  # that of its present class

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        getattr(self, COMES_AND_GOES).bring_to_copy(self)
        return self.__reduce_ex__(protocol)


class WatchedParameter(nn.Parameter):
    """A parameter whose `.data` is a view that counts writes together with it; torch counts those of `.data` apart.

    Arrays on its memory hold a tensor of their own, so that they show in the storage's references.
    """

    __slots__ = ()

    data = property(Tensor.detach, lambda self, value: _set_data(self, value))

    def detach(self) -> Tensor:
        found = Tensor.detach(self)
        if sys._getframe(1).f_code is _NEW_PARAMETER:  # which wants the class that it was given
            found.__class__ = WatchedParameter
        return found

    def set_(self: Tensor, *source: Any, **options: Any) -> Tensor:
        """Set it to memory, but not to its own, as torch does to parametrize it: that would count as a write."""
        is_same = len(source) == 1 and source[0] is self
        return self if is_same else Tensor.set_(self, *source, **options)

    def numpy(self, **options: Any) -> Any:
        return Tensor.detach(self).numpy(**options)

    def __dlpack__(self, **options: Any) -> Any:
        return Tensor.detach(self).__dlpack__(**options)

    def __deepcopy__(self, memo: Any) -> Any:
        found = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        found.__class__ = nn.Parameter
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        found = nn.Parameter(Tensor.detach(self), self.requires_grad)
        vars(found).update((name, each) for name, each in vars(self).items() if name != COMES_AND_GOES)
        return found.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _set_data(parameter: Any, value: Tensor) -> None:
    """Write the value where the parameter is bound, if it fits there and what is written goes home."""
    visiting = vars(parameter).get(COMES_AND_GOES)
    fits = (value.shape, value.dtype, value.device) == (parameter.shape, parameter.dtype, parameter.device)
    if fits and visiting is not None and visiting.is_written_home:
        with torch.no_grad():
            Tensor.detach(parameter).copy_(value)
    else:
        _data.__set__(parameter, value)


PARAMETER_TYPES.add(WatchedParameter)
# By function of a plain parameter, that of a watched one.
_data: Any = Tensor.data
WATCHED: dict[Any, Any] = {
    _data.__get__: Tensor.detach,
    Tensor.set_: WatchedParameter.set_,
    Tensor.numpy: WatchedParameter.numpy,
    Tensor.__dlpack__: WatchedParameter.__dlpack__,
}


class Classes(NamedTuple):
    """A parameter, and its classes: while it is away, while it is there, and for modes that know no other."""

    parameter: Tensor
    away: Any
    watched: Any
    plain: Any

    @classmethod
    def of(cls, parameter: Tensor) -> "Classes":
        kind: Any = type(parameter)
        kind = nn.Parameter if kind is WatchedParameter else kind.__bases__[1] if issubclass(kind, Away) else kind
        return cls(parameter, _away_class(kind), WatchedParameter if kind is nn.Parameter else kind, kind)


def set_away(found: Iterable[Classes]) -> None:
    for each in found:
        each.parameter.__class__ = each.away


def set_present(found: Iterable[Classes]) -> None:
    is_seen = is_in_torch_dispatch_mode()
    for each in found:
        each.parameter.__class__ = each.plain if is_seen else each.watched


def set_plain(found: Iterable[Classes]) -> None:
    for each in found:
        each.parameter.__class__ = each.plain


def call_unseen(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on parameters that are away; an access to absent bytes raises an error that names the weight."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def _by_edges(function: Any, args: Any, kwargs: Any) -> Any:
    """Call `torch.autograd.grad` or `.backward` for weights that are away by their edges in the graph."""
    given = signature(function).bind(*args, **kwargs).arguments
    inputs = given["inputs"] if isinstance(given["inputs"], list | tuple) else (given["inputs"],)
    given["inputs"] = [get_gradient_edge(each) if isinstance(each, Tensor) else each for each in inputs]
    is_whole = given.pop("materialize_grads", False)
    found = function(**given, **({"allow_unused": True} if is_whole else {}))
    if not is_whole:
        return found
    return tuple(torch.zeros_like(each) if its is None else its for each, its in zip(inputs, found, strict=True))


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
    "__hash__ register_hook register_post_accumulate_grad_hook dense_dim sparse_dim is_distributed expand_as view_as"
)
_FUNCTIONS = (
    "is_floating_point is_complex numel is_tensor is_inference is_same_size is_conj is_neg is_signed zeros_like "
    "ones_like empty_like full_like rand_like randn_like"
)


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
