"""Traces the operation behind each tensor in forward, so that the tensor can be computed again.

Notes hold no tensors except weights, so they keep no memory alive.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from hf_memopt.activations.recompute.plain_dispatch import call_as_plain
from hf_memopt.autograd_state import (
    PLAIN_TYPES,
    StoragePin,
    ViewMeta,
    calling_module,
    in_backward,
    is_plain,
    is_regathered,
)
from hf_memopt.transfer.clock import Clock

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
# Recomputed for a saved output itself, never on the way to another one.
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


class TensorRef:
    """A tensor that an operation read, as a view of a storage. Only `weight`, the operand or its base, is held."""

    __slots__ = ("_storage", "_tensor", "is_leaf", "key", "meta", "num_writes", "version", "weight")

    def __init__(self, tensor: Tensor, weights: frozenset[int], num_writes: int) -> None:
        storage = tensor.untyped_storage()
        self.key = storage._cdata
        self.meta = ViewMeta(tensor)
        self.version = tensor._version
        self.num_writes = num_writes
        # As long as this exists, no other storage is given the same key.
        self._storage = StoragePin.of(storage)
        self._tensor = weakref.ref(tensor)
        is_weight = self.key in weights or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        # Not a view with its history, which would keep the gradient accumulator of a pass that is over.
        has_base = tensor.grad_fn is not None and tensor._base is not None
        self.weight = (tensor._base if has_base else tensor) if is_weight else None
        # Optimizers may update a leaf through `.data`, which does not bump its version counter.
        base = tensor if tensor._base is None else tensor._base
        self.is_leaf = base.requires_grad and base.grad_fn is None

    def alive(self) -> Tensor | None:
        """Return the tensor, if something else keeps it and it has the same bytes."""
        tensor = self._tensor()
        return tensor if tensor is not None and tensor._version == self.version else None


class TracedOp:
    """One operation that was performed and can be again: same function, same operands, same bits."""

    __slots__ = ("args", "func", "kwargs", "light", "marks", "module", "num_writes", "output", "storage", "version")

    def __init__(self, func: Any, args: Any, kwargs: Any, marks: tuple[Any, Any] | None) -> None:
        self.func, self.args, self.kwargs, self.marks = func, args, kwargs, marks
        self.light = func not in _HEAVY
        self.module: weakref.ref[nn.Module] | None = None
        self.output: int | None = None
        self.version = self.num_writes = 0
        self.storage: StoragePin | None = None


class OpTracer(TorchDispatchMode):
    """Notes for each new storage the operation that made it; some 15 us per operation on the host.

    Only functional, deterministic operations count: one that draws random numbers or writes into its operands cannot be
    repeated. Writes are counted by storage, as far as they are seen, since versions do not tell whether it still has
    the same bytes: `.data` and the parts of `unsafe_chunk` are counted apart.

    Args:
        weights: keys of storages that stay where they are until backward is over.
        clock: times each operation, and has it counted in `num_by_module`; None does not.
    """

    def __init__(self, weights: frozenset[int], clock: Clock | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights = weights
        self.is_noting = False
        self.clock = clock
        self._records: dict[int, TracedOp] = {}
        self._num_writes: dict[int, int] = {}
        self.distrusted: dict[int, StoragePin] = {}
        self.num_by_module: Counter[weakref.ref[nn.Module] | None] = Counter()

    def leave_node(self) -> None:
        """Leave the mode for the rest of a backward node; called while the node unpacks its saved tensors.

        torch's formulas look whether there is a mode: that of `prod` then takes another path, with other bits. The
        engine gives each node the modes that the thread had when backward began.
        """
        if is_innermost(self):
            _pop_mode()

    # Compiled regions run as they are; their results have no record.
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if places := written_arguments(func):
            self._count_writes([args[place] if place < len(args) else kwargs.get(name) for place, name in places])
        if not PLAIN_TYPES.issuperset(types) or getattr(func, "is_view", False):
            return func(*args, **kwargs)
        if not _is_repeatable(func) or in_backward():
            return call_as_plain(func, args, kwargs)
        start = self.clock.mark() if self.clock else None
        result = func(*args, **kwargs)
        marks = (start, self.clock.mark()) if self.clock else None
        self._note(func, args, kwargs, result, marks)
        return result

    def record_of(self, operand: TensorRef) -> TracedOp | None:
        """Return the operation behind an operand's bytes, if they are still those that it left."""
        record = self._records.get(operand.key)
        if record is None or record.version != operand.version or record.num_writes != operand.num_writes:
            return None
        return record

    def distrust(self, storage: UntypedStorage) -> None:
        """Note that a custom `autograd.Function` has a storage: its kernels may write to it without an operation."""
        self._records.pop(storage._cdata, None)
        self.distrusted[storage._cdata] = StoragePin.of(storage)

    def operand(self, tensor: Tensor) -> TensorRef:
        return TensorRef(tensor, self.weights, self.num_writes(tensor.untyped_storage()._cdata))

    def num_writes(self, key: int) -> int:
        return self._num_writes.get(key, 0)

    def is_unwritten(self, operand: TensorRef) -> bool:
        return self.num_writes(operand.key) == operand.num_writes

    def _count_writes(self, arguments: list[Any]) -> None:
        written: list[Tensor] = []
        map_tensors(written.append, arguments)
        for tensor in written:
            if is_plain(tensor):
                key = tensor.untyped_storage()._cdata
                self._num_writes[key] = self.num_writes(key) + 1

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, marks: tuple[Any, Any] | None) -> None:
        tensors: list[Tensor] = []
        map_tensors(tensors.append, [args, *kwargs.values()])
        outputs = [result] if isinstance(result, Tensor) else result
        if not isinstance(outputs, list | tuple) or not all(is_plain(tensor) for tensor in tensors):
            return
        if any(is_regathered(tensor) for tensor in tensors):  # not there when the operation would be repeated
            return
        args = map_tensors(self.operand, args)
        kwargs = {name: map_tensors(self.operand, value) for name, value in kwargs.items()}
        read = {tensor.untyped_storage()._cdata for tensor in tensors}
        module = calling_module() if marks is not None else None
        maker = None if module is None else weakref.ref(module)
        self.num_by_module[maker] += marks is not None
        hash(maker)  # a reference knows its hash once it was asked, and a module made for one call is soon gone
        for position, output in enumerate(outputs):
            # An output that is a view of an operand (_unsafe_view) was not made here.
            if not isinstance(output, Tensor) or not is_plain(output) or output.untyped_storage()._cdata in read:
                continue
            record = TracedOp(func, args, kwargs, marks)
            record.module = maker
            record.output = None if outputs is not result else position
            record.version = output._version
            record.num_writes = self.num_writes(output.untyped_storage()._cdata)
            record.storage = StoragePin.of(output.untyped_storage())
            self._records[output.untyped_storage()._cdata] = record


@cache
def _is_repeatable(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    is_known = func in _LIGHT or func in _HEAVY or torch.Tag.pointwise in func.tags
    return is_known and not (is_random or func.is_view or func._schema.is_mutable)


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the place and the name of each argument that an operation writes to; higher-order operators do not say."""
    arguments = func._schema.arguments if hasattr(func, "_schema") and func._schema.is_mutable else ()
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
    return tuple((place, argument.name) for place, argument in enumerate(arguments) if written[place])


def is_innermost(mode: TorchDispatchMode) -> bool:
    depth = torch._C._len_torch_dispatch_stack()
    return depth > 0 and torch._C._get_dispatch_stack_at(depth - 1) is mode


def map_tensors(function: Callable[[Any], Any], value: Any, kind: Any = Tensor) -> Any:
    """Replace everything of `kind` in a value; looks into lists and tuples."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list | tuple):
        return [map_tensors(function, item, kind) for item in value]
    return value


@contextmanager
def active_in(mode: TorchDispatchMode, modules: Collection[nn.Module], everywhere: bool) -> Iterator[None]:
    """Keep a mode, which slows operations down, active while one of `modules` is at work itself, not a submodule."""
    switch = _Switch(mode, everywhere)
    covered = {id(module) for module in modules}
    inner = {id(child): child for module in modules for child in _called_children(module)}
    handles = []
    try:
        for module in {**inner, **{id(module): module for module in modules}}.values():
            handles += switch.attach(module, id(module) in covered)
        with mode if everywhere else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def off_in_dual_levels(mode: TorchDispatchMode) -> Iterator[None]:
    """Keep a dispatch mode off inside of levels of forward-mode AD that are entered meanwhile.

    torch's formulas look whether there is any mode: those of layer norms then take another path, rounded otherwise. The
    two functions of `torch.autograd` that enter and leave levels are replaced.
    """
    enter_level, exit_level = forward_ad.enter_dual_level, forward_ad.exit_dual_level
    left: list[bool] = []

    def enter() -> int:
        left.append(is_innermost(mode))
        if left[-1]:
            _pop_mode()
        level: int = enter_level()  # type: ignore[no-untyped-call]
        return level

    def leave(*, level: int | None = None) -> None:
        exit_level(level=level)  # type: ignore[no-untyped-call]
        if left and left.pop():
            _push_mode(mode)

    forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter, leave
    try:
        yield
    finally:
        forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter_level, exit_level


def in_dual_level() -> bool:
    return forward_ad._current_level >= 0


class _Switch:
    def __init__(self, mode: TorchDispatchMode, is_on: bool) -> None:
        self._mode = mode
        self._is_on = is_on
        # Ids of the modules at work, and whether the mode was on before.
        self._entered: list[tuple[int, bool]] = []

    def attach(self, module: nn.Module, is_covered: bool) -> "list[torch.utils.hooks.RemovableHandle]":
        def enter(module: nn.Module, inputs: object) -> None:
            self._entered.append((id(module), self._is_on))
            self._turn(is_covered and not in_dual_level())

        def leave(module: nn.Module, inputs: object, output: object) -> None:
            # A module that was being called already when it got its hooks is left without having been entered.
            if self._entered and self._entered[-1][0] == id(module):
                self._turn(self._entered.pop()[1])

        return [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def _turn(self, on: bool) -> None:
        if on and not self._is_on:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            self._is_on = True
        elif self._is_on and not on and is_innermost(self._mode):
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_on = False


def _called_children(module: nn.Module) -> Iterable[nn.Module]:
    """Submodules that a module's own forward calls, but for compiled ones: hooks would make them compile again."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called_children(child)
        elif child._compiled_call_impl is None and not hasattr(child, "_orig_mod"):
            yield child
