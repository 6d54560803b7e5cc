"""Which operation computed a tensor, and from what: noted during the forward pass, so that it can be computed again.

Notes hold no tensors except weights, so they keep no memory alive.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.activations.residency import in_backward
from hf_memopt.activations.tensors import ViewMeta
from hf_memopt.transfer.clock import Clock
from hf_memopt.transfer.plain import PLAIN_TYPES

_aten = torch.ops.aten

# Operations of one pass over memory, besides those that torch tags as pointwise.
_LIGHT = {
    _aten._fused_rms_norm.default,
    _aten._log_softmax.default,
    _aten._softmax.default,
    _aten._to_copy.default,
    _aten.cat.default,
    _aten.constant_pad_nd.default,
    _aten.embedding.default,
    _aten.gather.default,
    _aten.index_select.default,
    _aten.mean.dim,
    _aten.native_group_norm.default,
    _aten.native_layer_norm.default,
    _aten.stack.default,
    _aten.sum.dim_IntList,
    _aten.upsample_nearest2d.default,
}
# Worth doing again for a large result, but not on the way to another one.
_HEAVY = {
    _aten._fft_c2c.default,
    _aten._fft_c2r.default,
    _aten._fft_r2c.default,
    _aten.addmm.default,
    _aten.baddbmm.default,
    _aten.bmm.default,
    _aten.convolution.default,
    _aten.mm.default,
}


class Operand:
    """A tensor that an operation read, as a view of a storage. Weights are held, everything else is not."""

    __slots__ = ("_storage", "_tensor", "key", "meta", "version", "weight")

    def __init__(self, tensor: Tensor, weights: frozenset[int]) -> None:
        storage = tensor.untyped_storage()
        self.key = storage._cdata
        self.meta = ViewMeta(tensor)
        self.version = tensor._version
        # As long as this exists, no other storage is given the same key.
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._tensor = weakref.ref(tensor)
        self.weight = tensor if self.key in weights or is_parameter(tensor) else None

    def alive(self) -> Tensor | None:
        """The tensor, if something else keeps it and it has the same bytes."""
        tensor = self._tensor()
        return tensor if tensor is not None and tensor._version == self.version else None


class Recipe:
    """One operation that was performed and can be again: same function, same operands, same bits."""

    __slots__ = ("args", "func", "kwargs", "light", "marks", "output", "storage", "version")

    def __init__(self, func: Any, args: Any, kwargs: Any, marks: tuple[Any, Any] | None) -> None:
        self.func, self.args, self.kwargs, self.marks = func, args, kwargs, marks
        self.light = func not in _HEAVY
        self.output: int | None = None
        self.version = 0
        self.storage: StorageWeakRef | None = None


class Producers(TorchDispatchMode):
    """Notes for each new storage the operation that made it.

    Only functional, deterministic operations count: what draws random numbers or writes into its operands cannot be
    repeated. Costs about 15 us per operation on the host, while it is active.

    Args:
        weights: keys of storages that stay where they are until backward is over.
        clock: times each operation; None does not.
    """

    def __init__(self, weights: frozenset[int], clock: Clock | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self._clock = clock
        self._recipes: dict[int, Recipe] = {}

    # Compiled regions run as they are; what they compute has no recipe.
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not PLAIN_TYPES.issuperset(types) or not _repeatable(func) or in_backward():
            return func(*args, **kwargs)
        start = self._clock.mark() if self._clock else None
        result = func(*args, **kwargs)
        marks = (start, self._clock.mark()) if self._clock else None
        self._note(func, args, kwargs, result, marks)
        return result

    def recipe(self, operand: Operand) -> Recipe | None:
        """How the bytes of an operand came about, if they are still those that the operation left."""
        recipe = self._recipes.get(operand.key)
        return recipe if recipe is not None and recipe.version == operand.version else None

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, marks: tuple[Any, Any] | None) -> None:
        operands: list[Operand] = []
        args = map_tensors(lambda tensor: self._operand(tensor, operands), args)
        kwargs = {name: map_tensors(lambda tensor: self._operand(tensor, operands), x) for name, x in kwargs.items()}
        read = {operand.key for operand in operands}
        single = isinstance(result, Tensor)
        for position, output in enumerate((result,) if single else result):
            # An output that is a view of an operand (_unsafe_view) was not made here.
            if isinstance(output, Tensor) and output.untyped_storage()._cdata not in read:
                recipe = Recipe(func, args, kwargs, marks)
                recipe.output = None if single else position
                recipe.version = output._version
                recipe.storage = StorageWeakRef(output.untyped_storage())  # type: ignore[no-untyped-call]
                self._recipes[output.untyped_storage()._cdata] = recipe

    def _operand(self, tensor: Tensor, operands: list[Operand]) -> Operand:
        operands.append(Operand(tensor, self._weights))
        return operands[-1]


_known: dict[Any, bool] = {}


def _repeatable(func: Any) -> bool:
    known = _known.get(func)
    if known is None:
        known = _known[func] = _is_repeatable(func)
    return known


def _is_repeatable(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable or func.is_view:
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return func in _LIGHT or func in _HEAVY or torch.Tag.pointwise in func.tags


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def map_tensors(function: Callable[[Any], Any], value: Any, kind: Any = Tensor) -> Any:
    """`value` with everything of `kind` in it replaced; looks into lists and tuples."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list | tuple):
        return [map_tensors(function, item, kind) for item in value]
    return value
