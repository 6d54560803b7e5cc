"""An optimizer's state that lives in host memory or in a file, and visits the device during the update."""

import inspect
import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from types import MethodType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._pytree import tree_map, tree_map_only

from hf_memopt.ranges import NOT_NEGATIVE
from hf_memopt.transfer import Copier
from hf_memopt.transfer.scratch_file import check_disk
from hf_memopt.units import GIB, MIB, format_bytes
from hf_memopt.weights.coupling import (
    REDIRECTED,
    UpdateVisits,
    bare_copy,
    bare_step,
    random_numbers_kept,
    refuse_coupled,
)
from hf_memopt.weights.homes.block_home import BlockHome
from hf_memopt.weights.homes.home import HOMES, Home
from hf_memopt.weights.homes.packed_weights import rewrapped
from hf_memopt.weights.optimizer_units import PackedState, StateUnit, Traffic, leaves

if TYPE_CHECKING:
    from hf_memopt.weights.trained import TrainedWeights

# State of small parameters travels together, up to so many bytes, or as many as that of the largest parameter.
_UNIT_BYTES = 32 * MIB
# Units on their way ahead of the one that is updated; all on their way take so many bytes at most.
_AHEAD = 2
_AHEAD_BYTES = 4 * _UNIT_BYTES
# What a GradScaler sets on a fused optimizer for one step.
_OF_SCALER = ("grad_scale", "found_inf")
_REMEDY = "load a checkpoint by load_state_dict()"


@dataclass(frozen=True)
class OptimizerReport:
    """The cost of an optimizer's state away from the device; prints as text. Totals since it was wrapped.

    Attributes:
        home: `"host"` or `"file"`.
        state_bytes: of the state that moves.
        resident_bytes: of the state that a budget keeps on the device.
        peak_bytes: the most of the moving state on the device at a time.
        num_updates: steps that were taken.
        bytes_read: brought to the device; `bytes_written`, back.
        stall_ms: time for which compute, and the host, waited for copies.
        wear: bytes written to the disk and in a day at this rate; empty without a file.
    """

    home: str
    state_bytes: int
    resident_bytes: int
    peak_bytes: int
    num_updates: int
    bytes_read: int
    bytes_written: int
    stall_ms: float
    wear: str

    def __str__(self) -> str:
        place = "a file" if self.home == "file" else "host memory"
        stays = f", {format_bytes(self.resident_bytes)} stay on the device" if self.resident_bytes else ""
        return (
            f"optimizer: {format_bytes(self.state_bytes)} of state in {place}{stays}, {format_bytes(self.peak_bytes)} "
            f"of it on the device at most; {self.num_updates} updates read {format_bytes(self.bytes_read)} and wrote "
            f"{format_bytes(self.bytes_written)}, waited {self.stall_ms:.1f} ms" + (self.wear and f"; {self.wear}")
        )


@dataclass(eq=False)
class _Visit:
    """Parameters of a group, by its number, to update at a time: of one unit, or all with state that stays."""

    unit: StateUnit | None
    number: int
    parameters: list[Tensor]


@dataclass
class _Update:
    """An update under way."""

    left: list[_Visit]
    gradients: dict[Tensor, tuple[Tensor, int]]  # with their versions, as it began
    of_scaler: dict[str, Any]  # what a GradScaler has set
    visits: UpdateVisits
    is_torn: bool = False  # the optimizer is at work on a visit
    is_in_backward: bool = False  # it has begun there, and `step` ends it
    updated: dict[Tensor, Tensor | None] = field(default_factory=dict)  # there, with their gradients


class OffloadedOptimizer(Optimizer):
    """Keeps the state of an optimizer in host memory or in a file, from which it visits the device during `step`.

    Weights and state are those of the optimizer alone, bit for bit: its own kernels run, for a few parameters at a
    time, in order. Their state is on its way while those before are updated. Gradients and weights stay where they are,
    so that clipping, accumulation, GradScaler, DistributedDataParallel and compiled models work as before.
    Learning-rate schedulers may be made of either object.

    Make it before `accelerator.prepare`, and call `step`, `zero_grad`, `state_dict` and `load_state_dict` of this
    object. Between updates the state on the device is away: reading it from the inner optimizer is a RuntimeError.

    Args:
        optimizer: any whose update of a parameter depends on nothing but the parameter, its gradient and its state.
            That is found out on two small parameters of each group.
        home: of the state between updates: `"host"`, page-locked memory on CUDA, or `"file"`.
        budget_gib: device memory for state that stays there. None: none stays.
        disk: existing folder on a local disk for the file, which has no name. None: the system's for temporary files.
        copier: how bytes move. None: side streams on an accelerator, plain copies on the CPU.

    Raises:
        ValueError: an optimizer whose updates depend on several parameters, need a closure or sparse gradients, or are
            meant for CUDA graphs; sharded parameters; an unknown home, a negative budget or no such folder.
        DiskError: in the first `step` or in `load_state_dict`, before anything is changed: the disk has no room.

    Attributes:
        optimizer: the one inside.

    Beyond the budget, the state on the device is that of the two largest parameters at most. Cost of a step: all other
    state is read and written once. The first one also updates copies of parameters of each shape, to measure.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        home: Home = "host",
        budget_gib: float | None = None,
        disk: str | os.PathLike[str] | None = None,
        copier: Copier | None = None,
    ) -> None:
        if home not in HOMES:
            raise ValueError(f"home={home!r} is unknown; use one of {', '.join(HOMES)}")
        NOT_NEGATIVE.check("budget_gib", budget_gib)
        check_disk(disk)
        _refuse(optimizer)
        self._writes_gradients = refuse_coupled(optimizer, optimizer.param_groups)
        self.optimizer = optimizer
        self._home_name, self._budget_bytes = home, int((budget_gib or 0) * GIB)
        self._home = BlockHome(home, copier, disk)
        self._traffic = Traffic()
        # None: their state stays on the device.
        self._units: dict[Tensor, StateUnit | None] = {}
        self._resident_bytes = 0
        self._update: _Update | None = None
        self._shown: _ShownState | None = None  # since the last update
        self._num_updates = 0
        self.weights: TrainedWeights | None = None

    def redirect(self) -> None:
        """Replace methods of the optimizer inside by those of this object, for code that holds that one."""
        inner = vars(self.optimizer)
        is_scheduled = hasattr(self.optimizer.step, "_wrapped_by_lr_sched")
        for name in REDIRECTED:
            inner[name] = MethodType(_method_of(self, name), self.optimizer)
        if is_scheduled:
            inner["step"].__func__._wrapped_by_lr_sched = True  # a scheduler warns where it is missing

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("optimizer")
        is_inner = inner is not None and name in vars(inner) and name not in ("step", *vars(self))
        object.__setattr__(inner if is_inner and not hasattr(type(self), name) else self, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an OffloadedOptimizer cannot be copied or pickled; save its state_dict()")

    # Lightning looks on the class for these.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property  # type: ignore[override]
    def state(self) -> Mapping[Any, Any]:
        """The state by parameter, with what is away where it lies at home: its tensors may be written in place."""
        if self._update is not None:
            return _ShownState(self.optimizer.state, self._units)
        if self._shown is None:
            self._shown = _ShownState(self.optimizer.state, self._units)
        return self._shown

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        """Take copies, which move with the next update."""
        copied = {key: tree_map_only(Tensor, Tensor.clone, value) for key, value in state.items()}
        self._forget(self._units)
        self.optimizer.state = defaultdict(dict, copied)
        self._units, self._resident_bytes, self._update, self._shown = {}, 0, None, None

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; a ValueError as for the constructor."""
        type(self.optimizer).add_param_group(self.optimizer, param_group)
        try:
            with patch.object(self.optimizer, "state", defaultdict(dict, self.state)):
                self._writes_gradients |= refuse_coupled(self.optimizer, self.param_groups[-1:])
        except BaseException:
            self.param_groups.pop()
            raise

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients.

        Raises:
            ValueError: a closure or a sparse gradient.
            DiskError: the file could not be read or written; `finish_update()` goes on.
            RuntimeError: an earlier update was interrupted, `state` has other values than it showed, or a CUDA graph is
                captured.
        """
        if closure is not None:
            raise ValueError("closure is not supported by OffloadedOptimizer; call it before step(), without one")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("OffloadedOptimizer.step() cannot be captured in a CUDA graph, which copies no state")
        if self._update is None or self._update.is_torn or not self._update.is_in_backward:
            self._refuse_interrupted()
        self._begin()
        self._go_on()

    @contextmanager
    def update_in_backward(self) -> Iterator[None]:
        """Enclose the last backward pass before `step`, and update each weight there once its gradient is complete.

        For weights that train with a home, where nothing reads, clips or scales gradients before `step`: an access to
        one that was used is a RuntimeError. The weight is on the device then, and neither it nor its gradient travels
        again. `step` updates the others: all of them in the first such pass, from which is learned which gradients
        come at once.

        Raises:
            ValueError: the weights have no home; see `StreamedWeights.adopt`.
            RuntimeError: an earlier update was interrupted. So is this one if the pass fails after the first update.
        """
        weights = self.weights
        if weights is None:
            raise ValueError("update_in_backward() needs weights with a home; StreamedWeights.adopt gives them one")
        self._refuse_interrupted()
        visits = self._visits(each for each in weights.at_once if self.optimizer.state.get(each))
        visit_of = {parameter: place for place, each in enumerate(visits) for parameter in each.parameters}
        waiting = [set(each.parameters) for each in visits]

        def when_complete(parameter: Tensor) -> bool:
            """Update the parameters of a visit when all their gradients are there."""
            if parameter not in visit_of:
                return False
            if self._update is None:
                self._forget_shown()
                self._update = _Update([], {}, {}, UpdateVisits(self.optimizer), is_in_backward=True)
            place = visit_of[parameter]
            waiting[place].discard(parameter)
            if not waiting[place]:
                with torch.autocast(parameter.device.type, enabled=False):
                    self._visit(self._update, visits[place], visits[max(place - _AHEAD, 0) : place][::-1])
                weights.gradients.use_up(visits[place].parameters)
                self._update.updated.update((each, each.grad) for each in visits[place].parameters)
            return True

        try:
            with weights.in_backward(when_complete):
                yield
        except BaseException:
            if self._update is not None:
                self._update.is_torn = True
            raise

    def finish_update(self) -> None:
        """Go on with an update that an error or an interrupt has ended, exactly as if it had not.

        Raises:
            RuntimeError: there is none, the gradients have changed since, or the optimizer was interrupted while it
                updated parameters, so that nobody can tell which: load a checkpoint.
        """
        update = self._update
        if update is None or (update.is_in_backward and not update.is_torn):
            raise RuntimeError("no update was interrupted; call step()")
        if update.is_torn:
            raise RuntimeError(f"the optimizer itself was interrupted, so that its update stays unfinished; {_REMEDY}")
        for parameter in chain.from_iterable(each.parameters for each in update.left):
            before, version = update.gradients[parameter]
            if parameter.grad is not before or before._version != version:
                raise RuntimeError(f"gradients have changed since the update was interrupted; {_REMEDY}")
        self._go_on()
        for hook in chain(self._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
            hook(self, (self,), {})

    def report(self) -> OptimizerReport:
        """Return the costs so far."""
        units = _different(self._units)
        return OptimizerReport(
            home=self._home_name,
            state_bytes=sum(unit.num_bytes for unit in units),
            resident_bytes=self._resident_bytes,
            peak_bytes=self._traffic.peak_bytes,
            num_updates=self._num_updates,
            bytes_read=self._traffic.bytes_read,
            bytes_written=self._traffic.bytes_written,
            stall_ms=sum(memory.stall_ms() for memory in self._home.memories.values()),
            wear="" if self._home.file is None else self._home.file.wear(),
        )

    def _refuse_interrupted(self) -> None:
        if self._update is not None and self._update.is_in_backward and not self._update.is_torn:
            raise RuntimeError("update_in_backward() has begun an update; call step(), which ends it")
        if self._update is not None:
            left = sum(len(each.parameters) for each in self._update.left)
            raise RuntimeError(
                f"an update was interrupted with {left} of {len(self._update.gradients)} parameters left; call "
                f"finish_update(), or {_REMEDY}"
            )

    def _forget_shown(self) -> None:
        """Forget the state that was shown; a RuntimeError where its values were replaced."""
        if self._shown is not None:
            self._shown.refuse_replaced()
            self._shown = None

    def _begin(self) -> None:
        self._forget_shown()
        before = self._update  # in backward
        gradients = {
            parameter: (parameter.grad, parameter.grad._version)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and (before is None or parameter not in before.updated)
        }
        if before is not None and any(each.grad is not its for each, its in before.updated.items()):
            raise RuntimeError(
                "gradients were replaced after update_in_backward() had used them; replace them before, or leave it out"
            )
        if any(gradient.layout is not torch.strided for gradient, _ in gradients.values()):
            raise ValueError("sparse gradients are not supported by OffloadedOptimizer; use dense ones")
        for unit in _different(self._units):
            unit.check()
        self._take_in(gradients)
        left = self._visits(gradients)
        of_scaler = {name: vars(self)[name] for name in _OF_SCALER if name in vars(self)}
        if self.weights is not None:  # fused kernels divide gradients by the scale, and count no write
            self.weights.writes_gradients = bool(of_scaler) or self._writes_gradients
        if before is None:
            # Options that count updates do so without gradients, too.
            self._update = _Update(left or [_Visit(None, 0, [])], gradients, of_scaler, UpdateVisits(self.optimizer))
        else:
            before.visits.refuse_changes()
            self._update = _Update(left, gradients, of_scaler, before.visits)

    def _visits(self, parameters: Iterable[Tensor]) -> list[_Visit]:
        """Return the visits of some parameters, in the order of the groups."""
        wanted, found = set(parameters), list[_Visit]()
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter in wanted:
                    unit = self._units[parameter]
                    if not found or (found[-1].unit, found[-1].number) != (unit, number):
                        found.append(_Visit(unit, number, []))
                    found[-1].parameters.append(parameter)
        return found

    def _go_on(self) -> None:
        update = self._update
        assert update is not None
        inner = vars(self.optimizer)
        inner |= update.of_scaler
        try:
            with nullcontext() if self.weights is None else self.weights.update():
                while update.left:
                    self._visit(update, update.left[0], update.left[1 : 1 + _AHEAD])
        finally:
            for name in update.of_scaler:
                inner.pop(name, None)
        self._traffic.settle()
        self._home.trim()
        self._update = None
        self._num_updates += 1

    def _visit(self, update: _Update, visit: _Visit, ahead: Sequence[_Visit]) -> None:
        """Update the parameters of a visit, while the state of those ahead is on its way."""
        unit = visit.unit
        if unit is not None:
            self._traffic.bring(unit)
            unit.arrive()
            for after in (each.unit for each in ahead):
                if after is not None and not (after.is_new or after.going) and self._traffic.has_room(after):
                    self._traffic.bring(after)
        with nullcontext() if self.weights is None else self.weights.visit(visit.parameters):
            if self.weights is not None and ahead and not update.is_in_backward:
                self.weights.gradients.fetch(ahead[0].parameters)
            update.is_torn = True
            update.visits.update(visit.number, visit.parameters)
            if update.is_in_backward:  # fused kernels count no write; a graph that has saved the weights is out of date
                torch.autograd.graph.increment_version(visit.parameters)
            if unit is not None:
                unit.pack(self.optimizer.state)
            if not update.is_in_backward:
                update.left.remove(visit)
            update.is_torn = False
        if unit is not None:
            self._traffic.send(unit)

    def _take_in(self, parameters: Iterable[Tensor]) -> None:
        """Give parameters that have none yet units, with places at home, and move the state there is."""
        new = {each for each in parameters if each not in self._units}
        if not new:
            return
        of_groups = [(group, [each for each in group["params"] if each in new]) for group in self.param_groups]
        sizes = self.state_sizes(new)
        largest = max(sizes.values(), default=0)
        most = min(_UNIT_BYTES, largest)
        self._home.largest_bytes = max(self._home.largest_bytes, largest)
        resident_bytes, staying, made = self._resident_bytes, [], list[StateUnit]()
        parts: list[list[Tensor]] = []
        for _, those in of_groups:
            part, part_bytes = list[Tensor](), 0
            for each in those:
                if 0 < sizes[each] <= self._budget_bytes - resident_bytes:
                    resident_bytes += sizes[each]
                    staying.append(each)
                    part = []
                    continue
                num_bytes = sizes[each] or each.nbytes  # state that comes later may have the parameter's size
                if not part or part_bytes + num_bytes > most or part[0].device != each.device:
                    part, part_bytes = [], 0
                    parts.append(part)
                part.append(each)
                part_bytes += num_bytes
        try:
            for part in parts:
                made.append(StateUnit(part, self._home, sum(map(sizes.__getitem__, part))))
        except BaseException:  # the disk is full
            for unit in made:
                unit.forget()
            raise
        self._resident_bytes = resident_bytes
        self._units.update(dict.fromkeys(staying))
        for unit in made:
            self._units.update(dict.fromkeys(unit.parameters, unit))
        for unit in made:
            limit_bytes = unit.num_bytes + min(unit.num_bytes, _AHEAD_BYTES)
            self._traffic.limit_bytes = max(self._traffic.limit_bytes, limit_bytes)
            if any(self.optimizer.state.get(each) for each in unit.parameters):
                self._traffic.bring(unit)
                unit.pack(self.optimizer.state)
                self._traffic.send(unit)
        self._traffic.settle()
        self._home.trim()

    def state_sizes(self, parameters: Iterable[Tensor]) -> dict[Tensor, int]:
        """Return the bytes of state that moves, of each of some parameters, which have been updated or not."""
        wanted, measured = set(parameters), dict[Any, int]()
        of_groups = ((group, each) for group in self.param_groups for each in group["params"])
        return {each: self._state_bytes(group, each, measured) for group, each in of_groups if each in wanted}

    def _state_bytes(self, group: dict[str, Any], parameter: Tensor, measured: dict[Any, int]) -> int:
        """Return the bytes of a parameter's state that move, as one update of a copy without gradients makes them."""
        if self.optimizer.state.get(parameter):
            return PackedState(self.optimizer.state, [parameter]).num_bytes
        key = id(group), type(parameter), parameter.shape, parameter.stride(), parameter.dtype, parameter.device
        if key not in measured:
            copied = torch.zeros_like(parameter).detach().requires_grad_()
            copied.grad = copied.detach()  # the same memory: nobody reads the numbers
            alone = bare_copy(self.optimizer, group, [copied])
            with random_numbers_kept(parameter.device):
                bare_step(alone)
            measured[key] = PackedState(alone.state, [copied]).num_bytes
        return measured[key]

    def state_dict(self) -> dict[str, Any]:
        """Return what the optimizer inside returns; the state that is away is shown where it lies at home.

        It takes no memory until it is read: of a file, the system's page cache. The next update changes the values, as
        it does those of torch's.
        """
        self._refuse_interrupted()
        self._forget_shown()
        with patch.object(self.optimizer, "state", defaultdict(dict, self.state)):
            return type(self.optimizer).state_dict(self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, of this class or of the optimizer inside, a few parameters at a time.

        Raises:
            ValueError: it is of other groups; nothing is changed then.
            DiskError: the disk has no room, for a moment for the state before and the new one; nothing is changed.
        """
        inner = self.optimizer
        state_dict = state_dict.copy()
        for pre_hook in inner._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        before = inner.param_groups, inner.state, self._units, self._resident_bytes, self._traffic.limit_bytes
        loaded: defaultdict[Any, Any] = defaultdict(dict)
        if self._update is not None:  # what it has left need not be written
            self._update.is_torn = True
            self._forget(self._units)
        with (
            patch.object(inner, "_optimizer_load_state_dict_pre_hooks", OrderedDict()),
            patch.object(inner, "_optimizer_load_state_dict_post_hooks", OrderedDict()),
        ):
            load = type(inner).load_state_dict
            load(inner, {**state_dict, "state": {}})
            self._units, self._resident_bytes, self._traffic.limit_bytes = {}, 0, 0
            try:
                for part in _parts(state_dict["state"]):
                    load(inner, {**state_dict, "state": part})
                    loaded.update(inner.state)
                    self._take_in([each for each in inner.state if isinstance(each, Tensor)])
            except BaseException:
                self._forget(self._units)
                inner.param_groups, inner.state, self._units, self._resident_bytes, self._traffic.limit_bytes = before
                raise
        inner.state, self._update, self._shown = loaded, None, None
        self._forget(before[2])  # what was loaded may lie there
        for hook in inner._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _forget(self, units: dict[Tensor, StateUnit | None]) -> None:
        for unit in _different(units):
            self._traffic.forget(unit)


class _ShownState(Mapping[Any, Any]):
    """The state of each parameter, with the tensors that are away as they lie at home."""

    def __init__(self, state: Mapping[Any, Any], units: Mapping[Tensor, StateUnit | None]) -> None:
        self._state, self._units = state, units
        self._at_home: dict[StateUnit, dict[int, Tensor]] = {}
        self._shown: dict[Any, tuple[Any, Any]] = {}  # values, with the identities that they had

    def __getitem__(self, key: Any) -> Any:
        if key not in self._shown:
            value = self._value(key)
            self._shown[key] = value, _identities(value)
        return self._shown[key][0]

    def refuse_replaced(self) -> None:
        for value, before in self._shown.values():
            if _identities(value) != before:
                raise RuntimeError(
                    "optimizer.state of a parameter was given other values, which its home would not take; write into "
                    "its tensors in place, or assign the state of all: optimizer.state = {...}"
                )

    def _value(self, key: Any) -> Any:
        value = self._state.get(key, {})
        unit = self._units.get(key) if isinstance(key, Tensor) else None
        if unit is not None and unit not in self._at_home:
            self._at_home[unit] = unit.at_home()
        shown = {} if unit is None else self._at_home[unit]
        return tree_map_only(Tensor, lambda each: rewrapped(each, lambda inner: shown.get(id(inner), inner)), value)

    def __contains__(self, key: object) -> bool:
        return key in self._state

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def _identities(value: Any) -> Any:
    return tree_map(lambda each: (id(each), each.data_ptr() if isinstance(each, Tensor) else None), value)


# Hooks run around the whole update, which torch.compile leaves alone.
OffloadedOptimizer.step = torch._disable_dynamo(  # type: ignore[method-assign, attr-defined]
    Optimizer.profile_hook_step(OffloadedOptimizer.step)
)


def _method_of(optimizer: OffloadedOptimizer, name: str) -> Callable[..., Any]:
    def method(inner: Optimizer, *args: Any, **options: Any) -> Any:
        return getattr(optimizer, name)(*args, **options)

    method.__name__ = name
    method.offloaded = optimizer  # type: ignore[attr-defined]
    return method


def offloaded(optimizer: Optimizer) -> OffloadedOptimizer | None:
    """Return the object by which an optimizer's state has a home, itself or the one that has redirected it, if any."""
    if isinstance(optimizer, OffloadedOptimizer):
        return optimizer
    step: Any = getattr(optimizer, "step", None)
    found: OffloadedOptimizer | None = getattr(getattr(step, "__func__", None), "offloaded", None)
    return found


def report_of(optimizer: Any) -> OptimizerReport | None:
    """Return the costs so far of an optimizer, or of the one inside accelerate's, whose state has a home."""
    inner = optimizer if isinstance(optimizer, OffloadedOptimizer) else getattr(optimizer, "optimizer", None)
    return inner.report() if isinstance(inner, OffloadedOptimizer) else None


def _different(units: Mapping[Tensor, StateUnit | None]) -> set[StateUnit]:
    return {unit for unit in units.values() if unit is not None}


def _parts(state: Mapping[Any, Any]) -> Iterator[dict[Any, Any]]:
    """Cut saved state into parts of neighbouring parameters, of so many bytes as units have."""
    part: dict[Any, Any] = {}
    num_bytes = 0
    for key, value in state.items():
        its_bytes = sum(leaf.tensor.nbytes for leaf in leaves(value)) if isinstance(value, dict) else 0
        if part and num_bytes + its_bytes > _UNIT_BYTES:
            yield part
            part, num_bytes = {}, 0
        part[key] = value
        num_bytes += its_bytes
    yield part


def _refuse(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer={name} is no torch.optim.Optimizer")
    if isinstance(optimizer, OffloadedOptimizer):
        raise ValueError("optimizer is an OffloadedOptimizer already; use it, or wrap its .optimizer")
    if name == "AcceleratedOptimizer":
        raise ValueError("optimizer is accelerate's already; make the OffloadedOptimizer before accelerator.prepare")
    if type(optimizer).__module__.partition(".")[0] == "bitsandbytes":
        raise ValueError(
            f"optimizer={name}: bitsandbytes' optimizers have options by the places of parameters; use its paged ones"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(f"optimizer={name} needs a closure in each step, which OffloadedOptimizer cannot repeat")
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        raise ValueError(f"optimizer={name} reads its state in .train() and .eval(), between updates, where it is away")
    if "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise ValueError(f"optimizer={name} has a replaced .step, which visits would call several times; leave it")
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, group in enumerate(optimizer.param_groups):
        if group.get("capturable"):
            raise ValueError(f"capturable=True of group {number} is for CUDA graphs, whose replays copy no state")
    if any(hasattr(each, "device_mesh") or hasattr(each, "ds_id") for each in parameters):
        raise ValueError("parameters are sharded by FSDP or DeepSpeed; use the optimizer offload of these")
    held = set(map(id, parameters))
    for attribute in vars(optimizer).keys() - {"state", "param_groups"}:
        value = vars(optimizer)[attribute]
        inside = [value, *(value if isinstance(value, list | tuple | set) else ())]
        inside += (*value, *value.values()) if isinstance(value, dict) else ()
        if any(id(each) in held or isinstance(each, Optimizer | nn.Module) for each in inside):
            raise ValueError(
                f"optimizer={name} keeps parameters, a model or an optimizer in .{attribute}, through which a step for "
                "some parameters may reach others"
            )
