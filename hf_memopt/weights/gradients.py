"""Gradients that live in host memory or in a file from when they are complete until the update.

    backward ── take() ──► on its way home ── settle() ──► away ── enter() ──► the update ── leave() ──► away

The object in a parameter's `.grad` stays: an `AwayGradient`, which brings the bytes for any function that needs them.
Norms are recorded while the bytes are there, and factors are kept until they are needed, so that clipping moves none.
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from hf_memopt.autograd_state import PLAIN_TYPES, bytes_of, in_backward, num_tensors_on
from hf_memopt.transfer.copier import Transfer
from hf_memopt.transfer.lower_memory import Place
from hf_memopt.weights.homes.block_home import BlockHome

_aten = torch.ops.aten
# Operators in place whose operand can wait until the bytes are brought, by those of lists that are the same for each.
_FACTORS: dict[Any, Any] = {
    _aten._foreach_mul_.Scalar: _aten.mul_.Scalar,
    _aten._foreach_mul_.Tensor: _aten.mul_.Tensor,
    _aten._foreach_div_.Scalar: _aten.div_.Scalar,
    _aten._foreach_div_.Tensor: _aten.div_.Tensor,
}
# Operators of one list that treat its tensors apart, so that one at a time needs to be there.
_ONE_BY_ONE = {
    *_FACTORS,
    _aten._foreach_norm.Scalar,
    _aten._foreach_zero_.default,
    _aten._foreach_clamp_min_.Scalar,
    _aten._foreach_clamp_max_.Scalar,
    _aten._amp_foreach_non_finite_check_and_unscale_.default,
}


class _Slot:
    """A parameter's places for its gradient: one, unless an earlier gradient is still held by someone."""

    def __init__(self, parameter: nn.Parameter, name: str, has_home: bool) -> None:
        # torch's garbage collector does not see that a gradient in `.grad` has this.
        self._parameter = weakref.ref(parameter)
        self.name, self.has_home = name, has_home
        self.free: list[Place] = []
        self.handle: RemovableHandle | None = None
        self.num_additions = 0  # to its gradient

    @property
    def parameter(self) -> nn.Parameter | None:
        return self._parameter()


class _Gradient:
    """The bytes of a gradient: on the device as `value`, or in `place`. Detached gradients share them.

    Attributes:
        factors: operators and operands that are applied to the bytes at home whenever these are brought.
        norms: by order, norms of the bytes at home, as `torch._foreach_norm` computes them.
        is_changed: whether `value` has other bytes than those whose norm was recorded.
        is_viewed: whether others may have views of `value`, or itself, so that it stays as long as they do.
        is_used: whether an update in backward has used it, so that it is gone.
    """

    place: Place | None = None

    def __init__(self, gradients: "Gradients", slot: _Slot, value: Tensor, place: Place | None) -> None:
        self.gradients, self._slot = gradients, slot
        self.place = place
        self.factors: list[tuple[Any, Any]] = []
        self.is_changed = self.is_viewed = self.is_used = False
        self.coming: Transfer | None = None
        self.going: Transfer | None = None
        self._is_starting = False  # one of both
        self._dtype, self._device, self._size, self._stride = value.dtype, value.device, value.size(), value.stride()
        self.value: Tensor | None = value
        self.nbytes = value.nbytes
        self.norms: dict[float, Tensor] = {}
        self._memory: Tensor | None = None

    def __del__(self) -> None:
        if self.place is not None:
            if self._is_starting or self.going is not None:
                self.gradients.home.settle()  # before others get the place
            self._slot.free.append(self.place)

    def _settle_interrupted(self) -> None:
        """Wait for a copy that an interrupt has cut off as it was started."""
        if self._is_starting:
            self.gradients.home.settle()
            self._is_starting = False

    @property
    def present(self) -> Tensor:
        assert self.value is not None
        return self.value

    def can_wait(self) -> bool:
        """Return whether the bytes are at home, or on their way, and nobody else sees them."""
        return self.place is not None and not (self.is_viewed or self.is_changed or self.is_used)

    def fetch(self) -> None:
        """Start bringing the bytes."""
        self._settle_interrupted()
        if self.value is None and self.coming is None:
            assert self.place is not None
            memory, block = self.place
            self._is_starting = True
            self._memory = memory.empty_device(self.nbytes, block, 0)
            self.coming = memory.read(block, self._memory)
            self._is_starting = False
            self.gradients.bytes_read += self.nbytes

    def bring(self) -> Tensor:
        """Return the value on the device, with all factors applied."""
        value = self.bring_unscaled()
        if self.factors:
            try:
                for function, operand in self.factors:
                    function(value, operand)
            except BaseException:  # an interrupt, too
                self.drop()
                raise
            self.factors, self.is_changed = [], True
        return value

    def bring_unscaled(self) -> Tensor:
        if self.is_used:
            raise RuntimeError(
                f"gradient of {self._slot.name!r} is gone: the update in backward has used it, for training where "
                "nothing reads, clips or zeroes them; leave out update_in_backward(), or max_grad_norm=0 of a Trainer"
            )
        if self.going is not None:
            self.settle()
        if self.value is None:
            self.fetch()
            assert self.coming is not None
            assert self._memory is not None
            try:
                self.coming.wait()
            finally:
                self.coming = None
            memory, self._memory = self._memory, None
            if memory.storage_offset():  # which functions may be given, as they find it in `AwayGradient`
                memory = torch.from_numpy(memory.numpy())
            with torch.no_grad():
                empty = torch.empty(0, dtype=self._dtype, device=memory.device)
                self.value = empty.set_(memory.untyped_storage(), 0, self._size, self._stride)
        return self.value

    def send(self) -> None:
        """Record the norms, and start writing the value home."""
        self._settle_interrupted()
        self.record_norms()
        value = self.present
        if self.place is not None and not self.is_viewed:
            memory, block = self.place
            first = value.storage_offset() * value.itemsize
            self._is_starting = True
            self.going = memory.write(bytes_of(value)[first : first + self.nbytes], block)
            self._is_starting = False
        self.is_changed = False

    def record_norms(self) -> None:
        self.norms = {order: torch._foreach_norm([self.present], order)[0] for order in self.gradients.orders}

    def settle(self) -> None:
        """Wait until the value is at home."""
        if self.going is not None:
            try:
                self.going.wait()
            except Exception:
                self.going, self.is_changed = None, True  # the value stays
                raise
            self.going = None

    def is_held(self) -> bool:
        """Return whether anybody else has the value, or a view of it."""
        return sys.getrefcount(self.value) > 2 or num_tensors_on(self.present.untyped_storage()._cdata) > 1

    def drop(self) -> None:
        """Give up the value on the device, whose bytes are at home."""
        if self.place is not None and not self.is_viewed:
            self.value = None


class AwayGradient(Tensor):
    """A gradient whose bytes may be away, in a parameter's `.grad`: any function of tensors brings them.

    `type(p.grad) is Tensor` is False, the only difference that is left. To keep its values, clone it.
    """

    gradient: _Gradient
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, gradient: _Gradient) -> "AwayGradient":
        made: Any = Tensor._make_wrapper_subclass
        layout = {"strides": gradient._stride, "dtype": gradient._dtype, "device": gradient._device}
        found: AwayGradient = made(cls, gradient._size, **layout)
        found.gradient = gradient
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if isinstance(first, AwayGradient):
            return _answer(func, first, args, kwargs)
        if func in _ONE_BY_ONE and not any(isinstance(each, AwayGradient) for each in args[1:]):
            found = [_element(func, each, args[1:], kwargs) for each in first]
            return found if func is _aten._foreach_norm.Scalar else None
        return _on_values(func, args, kwargs)

    data = property(Tensor.detach, lambda self, value: self._replace(value))

    def _replace(self, value: Tensor) -> None:
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            raise RuntimeError(
                f"gradient of {self.gradient._slot.name!r} cannot be replaced by a {value.dtype} tensor of shape "
                f"{tuple(value.shape)} on {value.device}; assign p.grad itself"
            )
        with torch.no_grad():
            self.copy_(value)

    def numpy(self, **options: Any) -> Any:
        return self._for_good().numpy(**options)

    def __dlpack__(self, **options: Any) -> Any:
        return self._for_good().__dlpack__(**options)

    def share_memory_(self) -> Any:
        name = self.gradient._slot.name
        raise RuntimeError(f"gradient of {name!r} cannot be shared with processes; share its clone()")

    def tolist(self) -> Any:
        return self.clone().tolist()

    def __deepcopy__(self, memo: Any) -> Tensor:
        found = memo[id(self)] = self.clone()
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.clone())

    def _for_good(self) -> Tensor:
        """Return the value, which stays on the device from now on."""
        with self.gradient.gradients.lock:
            value = self.gradient.bring()
            self.gradient.gradients.note_view(self.gradient)
            return value


class Gradients:
    """Move each gradient to its home when it is complete, and back for the update.

    Args:
        home: of the gradients.
        lock: of all bookkeeping; backward passes may run on several threads.

    Attributes:
        orders: of the norms that are recorded.
        limit_bytes: of gradients on their way home at a time, unless one is larger.
        when_added: called with each parameter whose gradient a backward pass has made, or added to; the gradient stays
            on the device where it returns True.
    """

    def __init__(self, home: BlockHome, lock: threading.RLock) -> None:
        self.home, self.lock = home, lock
        self._slots: dict[int, _Slot] = {}
        self._going: deque[_Gradient] = deque()
        self.orders = {2.0}
        self.when_added: Callable[[Tensor], bool] | None = None
        self._factor: tuple[Any, bool] = (None, False)
        self.limit_bytes = 0
        self._viewed: list[weakref.ref[_Gradient]] = []
        self.bytes_read = self.bytes_written = 0

    @property
    def host_bytes(self) -> int:
        """Return the host memory of their home, or that they pass through."""
        return sum(memory.host_bytes_held for memory in self.home.memories.values())

    def follow(self, parameter: nn.Parameter, name: str, has_home: bool) -> None:
        """Take the gradients of a parameter; without a home they stay on the device, in the same kind of object."""
        slot = self._slots.get(id(parameter))
        if slot is None:
            slot = self._slots[id(parameter)] = _Slot(parameter, name, has_home)
        if slot.handle is None and parameter.requires_grad:
            hook = partial(_take_in, weakref.ref(self), slot)
            slot.handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            if has_home:
                self.limit_bytes = max(self.limit_bytes, parameter.nbytes)

    def reserve(self) -> None:
        """Take a place for each gradient; an error if there is no room."""
        for slot in self._slots.values():
            parameter = slot.parameter
            needs_place = slot.has_home and slot.handle is not None and not slot.free
            if needs_place and parameter is not None and parameter.grad is None:
                slot.free.append(self.home.place(parameter.device, parameter.nbytes))

    def fetch(self, parameters: Iterable[Tensor]) -> None:
        """Start bringing the gradients of parameters."""
        for parameter in parameters:
            if isinstance(parameter.grad, AwayGradient):
                parameter.grad.gradient.fetch()

    def enter(self, parameters: Iterable[Tensor], entered: "list[Entered]") -> None:
        """Replace gradients that are away by their values, for an optimizer, and note them in a list."""
        for parameter in parameters:
            away = parameter.grad
            if isinstance(away, AwayGradient):
                value = away.gradient.bring_unscaled()
                entered.append(Entered(parameter, away, value))
                for function, operand in away.gradient.factors:
                    function(value, operand)
                entered[-1].version = value._version
                parameter.grad = value

    def leave(self, entered: "Iterable[Entered]", are_written: bool) -> None:
        """Put the objects back in the place of values; what is at home stays as it is, unless a value was written.

        `are_written` says that the optimizer may have done so in a way that torch does not count.
        """
        for each in entered:
            gradient = each.away.gradient
            if each.value is not None and each.parameter.grad is each.value:
                each.parameter.grad = each.away
            value, each.value = each.value, None
            if value is None:  # it has left
                continue
            is_whole = each.version is not None  # all factors were applied
            is_written = are_written or value._version != each.version
            del value
            is_held = gradient.value is not None and gradient.is_held()  # by the optimizer's state, for example
            if is_whole and is_held:
                self.note_view(gradient)
            if is_whole and (is_held or is_written):
                gradient.factors, gradient.is_changed = [], True
                self.put_back(gradient)
            elif gradient.factors or not gradient.is_changed:
                gradient.drop()

    def is_one(self, factor: Any) -> bool:
        """Return whether a factor changes nothing; the host waits for one on the device, once for all gradients."""
        if self._factor[0] is not factor:
            self._factor = factor, bool(factor == 1)
        return self._factor[1]

    def norm_of(self, gradient: _Gradient, order: float) -> Tensor:
        """Return a norm, as `torch._foreach_norm` computes it; those of this order are recorded from now on."""
        with self.lock:
            self.orders.add(order)
            is_other = gradient.factors or gradient.is_changed or gradient.is_viewed
            if order in gradient.norms and (gradient.is_used or not is_other):
                return gradient.norms[order].clone()
            try:
                return torch._foreach_norm([gradient.bring()], order)[0]
            finally:
                self.put_back(gradient)

    def put_back(self, gradient: _Gradient) -> None:
        """End a use of the value: write it home where it has changed, and drop it."""
        if gradient.is_changed and self.when_added is not None and in_backward():
            return  # `take` comes next
        self._end_views()
        if gradient.is_changed:
            self._send(gradient)
        elif gradient.going is None:
            gradient.drop()

    def use_up(self, parameters: Iterable[Tensor]) -> None:
        """Give up gradients that an update in backward has used, but for their norms.

        Clipping that does not clip is allowed, by which trainers ask for norms. Any other use raises an error.
        """
        for parameter in parameters:
            if isinstance(parameter.grad, AwayGradient):
                gradient = parameter.grad.gradient
                gradient.value, gradient.is_changed, gradient.is_used = None, False, True

    def num_additions(self) -> dict[Tensor, int]:
        """Return how often a gradient was made, or added to, by parameter, since the last call."""
        found: dict[Tensor, int] = {}
        for slot in self._slots.values():
            parameter = slot.parameter
            if parameter is not None and slot.num_additions:
                found[parameter] = slot.num_additions
            slot.num_additions = 0
        return found

    def settle(self) -> None:
        """Wait until all gradients are at home."""
        self._end_views()
        while self._going:
            self._settle_first()

    def note_view(self, gradient: _Gradient) -> None:
        """Take note that others may have views of a value, which then stays."""
        if not gradient.is_viewed:
            gradient.is_viewed = True
            self._viewed.append(weakref.ref(gradient))

    def _end_views(self) -> None:
        """Write values home that nobody has a view of any more."""
        viewed, self._viewed = self._viewed, []
        for each in viewed:
            gradient = each()
            if gradient is None or gradient.is_used:
                continue
            if gradient.is_held():
                self._viewed.append(each)
            else:
                gradient.is_viewed, gradient.is_changed = False, True
                self._send(gradient)

    def remove(self) -> None:
        """Leave plain gradients, on the device, in the place of all."""
        for slot in self._slots.values():
            if slot.handle is not None:
                slot.handle.remove()
            parameter = slot.parameter
            if parameter is not None and isinstance(parameter.grad, AwayGradient):
                gradient = parameter.grad.gradient
                parameter.grad = gradient.bring()
                self.note_view(gradient)
        self.settle()

    def take(self, slot: _Slot, parameter: Any) -> None:
        """Take the gradient that a backward pass has made for a parameter, or has added to."""
        value = parameter.grad
        slot.num_additions += 1
        if isinstance(value, AwayGradient):
            with self.lock:
                if value.gradient.is_changed and not self._stays(parameter, value.gradient):
                    self._send(value.gradient)
            return
        if value is None:
            return
        if value.layout is not torch.strided:
            raise ValueError(
                f"gradient of trained weight {slot.name!r} is sparse, which has no home; make its module with "
                "sparse=False"
            )
        if type(value) not in PLAIN_TYPES or value.requires_grad:  # as create_graph=True leaves it
            return
        with self.lock:
            most = _uses_of_new() if value._version == 0 else (_uses_of_new()[0], 1)  # else it was added to
            is_held = any(uses > usual for uses, usual in zip(_uses(value), most, strict=True))
            if value.storage_offset() and not is_held:
                value = value.clone()  # a part of a larger tensor
            gradient = _Gradient(self, slot, value, self._place_for(slot, value))
            parameter.grad = AwayGradient(gradient)
            gradient.is_changed = True
            if is_held:
                self.note_view(gradient)
            if not self._stays(parameter, gradient):
                self._send(gradient)

    def _stays(self, parameter: Tensor, gradient: _Gradient) -> bool:
        if self.when_added is None:
            return False
        gradient.record_norms()
        return self.when_added(parameter)

    def _place_for(self, slot: _Slot, value: Tensor) -> Place | None:
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(value) and not (value.is_conj() or value.is_neg())
        if not slot.has_home or not is_dense or value.nbytes == 0:
            return None
        if not slot.free:
            self.settle()  # one that nobody has any more may be on its way
        for number, place in enumerate(slot.free):
            if place.nbytes == value.nbytes:
                return slot.free.pop(number)
        return self.home.place(value.device, value.nbytes)

    def _send(self, gradient: _Gradient) -> None:
        while self._going and sum(each.nbytes for each in self._going) + gradient.nbytes > self.limit_bytes:
            self._settle_first()
        gradient.send()
        if gradient.going is not None:
            self.bytes_written += gradient.nbytes
            self._going.append(gradient)

    def _settle_first(self) -> None:
        gradient = self._going[0]
        try:
            gradient.settle()
        finally:
            if gradient.going is None:
                self._going.popleft()
        if not gradient.is_changed:
            gradient.drop()


@dataclass
class Entered:
    """A gradient in use by an optimizer: its object, its value, and the version of that once all factors are applied.

    There are factors only for a value that its home has, too.
    """

    parameter: Tensor
    away: AwayGradient
    value: Tensor | None
    version: int | None = None


def _take_in(gradients: "weakref.ref[Gradients]", slot: _Slot, parameter: Tensor) -> None:
    found = gradients()
    if found is not None:
        found.take(slot, parameter)


def _uses(value: Tensor) -> tuple[int, int]:
    """Return references to a gradient, and tensors on its memory."""
    return sys.getrefcount(value), num_tensors_on(value.untyped_storage()._cdata)


@cache
@torch.inference_mode(False)
def _uses_of_new() -> tuple[int, int]:
    """Return what `_uses` counts in a hook for a gradient that is new and that nobody else has."""
    leaf, found = torch.ones(1, device="cpu", requires_grad=True), list[tuple[int, int]]()

    def take(parameter: Any) -> None:
        value = parameter.grad
        found.append(_uses(value))

    leaf.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    with torch.enable_grad():
        torch.autograd.backward(leaf * 2)
    return found[0]


def _answer(function: Any, first: AwayGradient, args: Any, kwargs: Any) -> Any:
    """Return the result of a function whose first argument is away, without its bytes where that is possible."""
    gradient = first.gradient
    if function is _aten.detach.default:
        return AwayGradient(gradient)
    order = _order(args, kwargs) if function is _aten.linalg_vector_norm.default else None
    if order is not None and (first.device.type == "cpu" or _is_asked_by_clipping()):
        return gradient.gradients.norm_of(gradient, order)
    if function in _FACTORS.values() and not kwargs:
        operand = args[1]
        if gradient.is_used and gradient.gradients.is_one(operand):
            return first
        is_number = not isinstance(operand, Tensor) or (operand.dim() == 0 and type(operand) in PLAIN_TYPES)
        if gradient.can_wait() and is_number:
            gradient.factors.append((function, operand.clone() if isinstance(operand, Tensor) else operand))
            return first
    return _on_values(function, args, kwargs)


def _element(function: Any, each: Tensor, args: Any, kwargs: Any) -> Any:
    """Return the result of a function of lists for one element of its first list."""
    if isinstance(each, AwayGradient):
        order = _order((each, *args), kwargs) if function is _aten._foreach_norm.Scalar else None
        if order is not None:
            return each.gradient.gradients.norm_of(each.gradient, order)
        if function in _FACTORS and not kwargs:
            return _answer(_FACTORS[function], each, (each, *args), kwargs)
        found = _on_values(function, ([each], *args), kwargs)
    else:
        found = function([each], *args, **kwargs)
    return found[0] if found else None


def _on_values(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a function for values that are brought, and written home where it has changed them."""
    found = {id(each.gradient): each for each in tree_leaves((args, kwargs)) if isinstance(each, AwayGradient)}
    gradients = next(iter(found.values())).gradient.gradients
    with gradients.lock:
        try:
            for each in found.values():
                each.gradient.bring()
            for each in _written(function, args, kwargs):  # which torch does not count here
                each.gradient.is_changed = True
            values = tree_map_only(AwayGradient, lambda each: each.gradient.present, (args, kwargs))
            result = function(*values[0], **values[1])
            away = {id(each.gradient.present): each for each in found.values()}
            by_storage = {each.gradient.present.untyped_storage()._cdata: each for each in found.values()}
            for tensor in tree_leaves(result):
                is_other = isinstance(tensor, Tensor) and id(tensor) not in away and type(tensor) in PLAIN_TYPES
                if is_other and tensor.untyped_storage()._cdata in by_storage:
                    gradients.note_view(by_storage[tensor.untyped_storage()._cdata].gradient)
            return tree_map_only(Tensor, lambda tensor: away.get(id(tensor), tensor), result)
        finally:
            for each in found.values():
                gradients.put_back(each.gradient)


def _written(function: Any, args: Any, kwargs: Any) -> list[AwayGradient]:
    """Return those that a function writes."""
    names = (each.name for each in function._schema.arguments if each.alias_info and each.alias_info.is_write)
    places = {each.name: place for place, each in enumerate(function._schema.arguments)}
    given = [kwargs[name] if name in kwargs else args[places[name] : places[name] + 1] for name in names]
    return [each for each in tree_leaves(given) if isinstance(each, AwayGradient)]


def _order(args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
    """Return the order of the norm of a whole tensor, or None for other arguments."""
    return None if kwargs or len(args) > 2 else float(args[1]) if len(args) == 2 else 2.0


def _is_asked_by_clipping() -> bool:
    """Return whether torch's clipping asks, which takes `_foreach_norm` of plain gradients unless told otherwise.

    The two round differently on an accelerator.
    """
    code: Any = torch.nn.utils.clip_grad._get_total_norm.__wrapped__.__code__  # type: ignore[attr-defined]
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_locals["foreach"] is not False
