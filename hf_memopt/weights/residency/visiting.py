"""The engine of weights that are away: storages, modules that visit them, and reads that nothing announces."""

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_memopt.autograd_state import COMES_AND_GOES, calling_module, in_backward, is_plain
from hf_memopt.transfer import Copier
from hf_memopt.weights.homes.home import WeightsHome
from hf_memopt.weights.homes.packed_weights import PackedWeights, is_quantised, stored_tensors
from hf_memopt.weights.residency.away import WATCHED, Away, Classes, call_unseen, is_alias, set_plain
from hf_memopt.weights.residency.backward_visits import BackwardVisit, OpenVisits, WithStatement
from hf_memopt.weights.residency.guards import NotCopied
from hf_memopt.weights.residency.resident_set import ResidentSet, Visit
from hf_memopt.weights.residency.selection import calls_no_modules, visits_of
from hf_memopt.weights.residency.storages import HELD, WRITTEN, AutocastContexts, CastWeight, StreamedStorage
from hf_memopt.weights.residency.units import Unit

_NOTHING = nullcontext()
# Autocast hands these a cast of a weight, the same one as to its module.
_CAST_BY_AUTOCAST = {
    functional.linear,
    *(getattr(torch, f"conv{kind}{number}d") for kind in ("", "_transpose") for number in (1, 2, 3)),
    *(getattr(kind, name) for kind in (torch, Tensor) for name in ("matmul", "mm", "addmm")),
    Tensor.__matmul__,
    Tensor.__rmatmul__,
}


class Pass:
    """A pass of a thread through the model, and the user of storages that were read without a visit.

    Attributes:
        held: those storages, by number, and their casts where these are in use.
        num_ended: backward passes that were over when this one ended; None until then, and where none follows.
        num_ended_before: those that were over when it began.
    """

    def __init__(self, num_ended: int) -> None:
        self.held: dict[int, CastWeight | None] = {}
        self.num_ended: int | None = None
        self.num_ended_before = num_ended


class _OutsideVisit(NamedTuple):
    """A visit by code that is no module's, the user of its storages."""

    visit: Visit
    thread: int
    statement: WithStatement


class Visiting(NotCopied):
    """Brings the weights of a model for each use, whoever reads them, on any number of threads.

    A module's call visits the weights that it reads, and so do the nodes of autograd that the call makes. A weight that
    is read in a pass by anything else is brought before that happens, and stays until the pass and its backward are
    over; from the next pass on it belongs to the visit of the module that was running.

    Args:
        budget_bytes: see `ResidentSet`, as for `repeats`.
        is_written_home: see `StreamedStorage`.
        what: the weights, for error messages.
        remedy: the end of the message for an access to a weight that is away, outside of a pass.
        remedy_of_writes: of the message for a weight that was written.

    Attributes:
        lock: of all that follows.
        is_active: whether calls are visits, on any thread. Where passes do not repeat, a pass sets it.
        hidden: modules on which no hook may show: torch's encoder layer takes another path, with another rounding,
            where it or a module inside has one.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: PackedWeights,
        home: WeightsHome,
        device: torch.device,
        copier: Copier,
        budget_bytes: float,
        repeats: bool,
        remedy: str,
        remedy_of_writes: str,
        is_written_home: bool = False,
        what: str = "frozen weight",
    ) -> None:
        self.lock = threading.RLock()
        self._home, self._device, self._copier = home, device, copier
        self._remedy, self._remedy_of_writes, self._what, self._repeats = remedy, remedy_of_writes, what, repeats
        self.is_active, self.is_written_home = repeats, is_written_home
        self.when_entered: Callable[[Visit], None] | None = None
        self._slices_of = weights.slices_of
        self.names: dict[int, str] = {}
        owners: dict[int, list[Tensor]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            for number in self._slices_of.get(id(parameter), ()):
                self.names.setdefault(number, name)
                owners[number].append(parameter)
        self.found = [
            StreamedStorage(
                piece, owners[number], home, device, copier, self._message(self.names[number]), is_written_home
            )
            for number, piece in enumerate(weights.slices)
        ]
        home.trim()
        self._is_simulated = any(each.is_simulated for each in self.found)
        self.parameters = list({id(each): each for group in owners.values() for each in group}.values())
        # By the id of a plain parameter, or of a tensor inside a quantised one: number and place in its storage.
        self._places = {
            id(each): (number, place)
            for number, storage in enumerate(self.found)
            for place, each in enumerate(storage.tensors)
        }
        self._quantised = {
            each: [self._places[id(tensor)] for tensor in stored_tensors("", each)]
            for each in self.parameters
            if is_quantised(each)
        }
        self.storages = ResidentSet(self.found, budget_bytes, repeats)
        self.open_visits = OpenVisits(self._when_ended)
        self._casts: dict[tuple[int, torch.dtype], CastWeight] = {}
        self._contexts = AutocastContexts(device)
        self._units: dict[nn.Module, Unit] = {}
        layers = [each for each in model.modules() if isinstance(each, nn.TransformerEncoderLayer)]
        self.hidden = {module for layer in layers for module in layer.modules()}
        for module, visit in visits_of(model, self._slices_of).items():
            self._units[module] = Unit(module, visit, self)
        self._modules = set(model.modules())
        # Visits that belong to no module, each the same tuple at all times.
        self._other_visits: dict[Visit, Visit] = {}
        # The ids of weights that train which others than their modules have used under autocast.
        self._cast_by_torch: set[int] = set()
        # By thread, the pass that it is in, and its reads in calls outside of passes; passes that are over.
        self._passes: dict[int, Pass] = {}
        self._outside: dict[int, Pass] = {}
        self._over: list[Pass] = []
        self._outside_visits: dict[int, _OutsideVisit] = {}
        # The thread that is at work, None where several are: then parameters look as if they were away, so that each
        # read shows whose it is. Those of attention and of compiled regions do not, which would take another way.
        self._only_thread: int | None = -1
        self._always_shown = frozenset(
            number for module, unit in self._units.items() if calls_no_modules(module) for number in unit.visit
        )
        self._read_by: dict[nn.Module, dict[int, None]] = defaultdict(dict)
        self._has_failed = False

    # -------------------------------------------------------------------------------------------- passes

    def begin(self, kind: str) -> Pass:
        """Begin a pass of this thread, which `end` ends."""
        with self.lock:
            self._end_interrupted()
            has_failed = self.open_visits.close_old(self._is_held) or self._has_failed
            self._has_failed = False
            thread = threading.get_ident()
            gone = {thread, *self._outside} - {each.ident for each in threading.enumerate()} | {thread}
            before = [self._passes.get(thread), *(self._outside.pop(each, None) for each in gone)]
            for each in [*self._over, *before]:
                if each is not None and (
                    each.num_ended != self.open_visits.num_ended or not any(map(self._is_held, each.held))
                ):
                    self._release(each)
            self._over = [each for each in self._over if each.held]
            self._extend_units()
            self._forget_graphs()
            self.storages.begin(kind, has_failed)
            self._home.trim()
            self._passes[thread] = Pass(self.open_visits.num_ended)
            self._show(())
            return self._passes[thread]

    def end(self, over: Pass, has_failed: bool, needs_backward: bool) -> None:
        with self.lock:
            thread = threading.get_ident()
            if self._passes.get(thread) is not over:
                return  # it was interrupted, and another one has begun
            self._has_failed |= has_failed
            self._forget_graphs()
            if has_failed:
                self.open_visits.close_calls()
            if needs_backward and not has_failed:
                over.num_ended = self.open_visits.num_ended
                self._over.append(over)
            else:
                self._release(over)
            del self._passes[thread]
            has_ended = over.num_ended != over.num_ended_before or self.storages.order.is_over()
            if not self._passes and has_ended:
                self._end_pass()

    @contextmanager
    def visit(self, module: nn.Module, statement: WithStatement) -> Iterator[None]:
        """Keep the weights of a module, and of those inside, on the device, for code in a statement."""
        numbers = self.visit_of(module.parameters())
        with self.lock:
            self._end_interrupted()
            user = _OutsideVisit(numbers, threading.get_ident(), statement)
            self._outside_visits[id(user)] = user
        before: list[int] = []
        try:
            self.enter(numbers, user, is_model=False)
            before.extend(self.found[number].num_holders() for number in numbers)
            yield
        finally:
            try:
                self._hold_after(numbers, before)
            finally:
                self._note_written(numbers)
                self.leave(numbers, user)
                del self._outside_visits[id(user)]

    def _hold_after(self, numbers: Visit, before: list[int]) -> None:
        """Hold weights that may be read after a visit; `before` it, they had so many holders."""
        if in_backward():
            self._hold(numbers)
        elif torch.is_grad_enabled() and threading.get_ident() in self._passes:
            # Checkpointing keeps parameters themselves, which nobody sees.
            self._hold([number for number in numbers if self._is_held(number)])
        else:
            with self.lock:
                for number, num_holders in zip(numbers, before, strict=False):
                    if self.found[number].num_holders() > num_holders:
                        self.storages.keep(number, HELD)

    def _forget_graphs(self) -> None:
        context = self._contexts.present() if self._casts else None
        for cast in self._casts.values():
            cast.forget_graph(context)

    def _end_interrupted(self) -> None:
        """End visits of which an interrupt has cut off the end."""
        for key, each in list(self._outside_visits.items()):
            if not each.statement.may_be_running():
                self.leave(each.visit, each)
                del self._outside_visits[key]

    def bind(self) -> None:
        for storage in self.found:
            storage.bind()
        for parameter in self.parameters:
            setattr(parameter, COMES_AND_GOES, self)

    def finish(self, at_home: Sequence[Sequence[Tensor]], has_failed: bool) -> Sequence[Visit]:
        """End all passes, and bind the weights to their home; returns the visits that are expected from now on."""
        with self.lock:
            self.is_active = False
            try:
                self._passes.clear()
                self._outside.clear()
                self._over.clear()
                self.open_visits.close_old(self._is_held)
                self.storages.drop_all()
                self._home.trim()
                self._extend_units()
                return self.storages.begin("visit", has_failed)
            finally:
                for storage, tensors in zip(self.found, at_home, strict=True):
                    storage.unbind(tensors)

    def flush(self) -> None:
        """Write home what is newer on the device."""
        with self.lock:
            for each in (*self._passes.values(), *self._outside.values(), *self._over):
                self._note_written(each.held)
            for storage in self.found:
                storage.flush()

    def move_home(self, parameter: Tensor) -> None:
        """Write a parameter to the place that updates write, which a state dict can show for good."""
        numbers = self._slices_of[id(parameter)]
        if not all(self.found[number].bytes_to_home for number in numbers):
            with self._brought(numbers):
                self._note_written(numbers)

    def load(self, parameter: Tensor, value: Tensor) -> None:
        """Write a parameter, and its home."""
        with self._brought(self._slices_of[id(parameter)]), torch.no_grad():
            call_unseen(Tensor.copy_, (parameter, value), {})

    @contextmanager
    def _brought(self, numbers: Visit) -> Iterator[None]:
        user = object()
        try:
            self.enter(numbers, user, is_model=False)
            yield
        finally:
            self.leave(numbers, user)

    def enter_update(self, visit: Visit, user: object) -> None:
        """Enter the visit of an update, in which parameters have the classes that optimizers expect."""
        self.enter(visit, user, is_model=not in_backward())
        for number in visit:
            self.found[number].show(are_watched=False)

    def leave_update(self, visit: Visit, user: object) -> None:
        entered = [number for number in visit if user in self.found[number].users]
        for number in entered:
            self.found[number].show()
            self.found[number].note_written()
        self.leave(visit, user)

    def visits_of_owners(self) -> dict[int, list[Visit]]:
        """Return, by the id of each parameter, the visits of the modules that have it."""
        found: dict[int, list[Visit]] = defaultdict(list)
        for module, unit in self._units.items():
            for parameter in module._parameters.values():
                found[id(parameter)].append(unit.visit)
        return found

    def is_used_but_in(self, own: list[Visit], visit: Visit) -> bool:
        """Return whether storages of a visit are in use at the moment, but for calls whose visits are `own`."""
        users = (user for number in visit for user in self.found[number].users)
        return any(not isinstance(user, BackwardVisit) or user.visit not in own for user in users)

    def visit_of_update(self, parameters: Sequence[Tensor]) -> Visit:
        visit = self.visit_of(parameters)
        return self._other_visits.setdefault(visit, visit)

    def visit_of(self, parameters: Iterable[Tensor]) -> Visit:
        return tuple(dict.fromkeys(number for each in parameters for number in self._slices_of.get(id(each), ())))

    def is_unchanged(self, parameter: Tensor) -> bool:
        return all(self.found[number].is_unchanged() for number in self._slices_of[id(parameter)])

    def at_home(self, tensor: Tensor) -> Tensor:
        """Return the home's value of a plain parameter, or of a tensor inside a quantised one."""
        number, place = self._places[id(tensor)]
        return self._home.views[number][place]

    def follow_quantised(self) -> None:
        """Make the tensors inside quantised weights come and go, where `to(device)` has put others inside."""
        for parameter, places in self._quantised.items():
            for (number, place), tensor in zip(places, stored_tensors("", parameter), strict=True):
                if self.found[number].tensors[place] is not tensor:
                    self.found[number].follow(place, tensor)

    def restore(self) -> None:
        """Bring all weights, for good."""
        with self.lock:
            for number in range(len(self.found)):
                self.storages.keep(number, "no longer streamed")
                self.enter((number,), self)
            self.remove()

    def remove(self) -> None:
        while self._units:
            self._units.popitem()[1].remove()
        for parameter in self.parameters:
            vars(parameter).pop(COMES_AND_GOES, None)
        set_plain(map(Classes.of, self.parameters))

    # -------------------------------------------------------------------------------------------- reads

    def read(self, function: Any, args: Any, kwargs: Any, parameters: list[Tensor]) -> Any:
        """Return the result of a function that reads or writes parameters whose bytes are away.

        Raises RuntimeError outside of a pass; inside, brings them first, or looks rows of a table up at home.
        """
        numbers = self.visit_of(parameters)
        if self._only_thread is None and self._has_entered(numbers):
            return call_unseen(WATCHED.get(function, function), args, kwargs)
        if not self._is_in_pass():
            if is_alias(function):
                return call_unseen(function, args, kwargs)
            raise RuntimeError(self._message(self._name_of(parameters[0])))
        table = _looked_up(function, args, kwargs)
        if table is not None and table[0] is parameters[0]:
            return self._rows(*table)
        if function is functional.multi_head_attention_forward and not _needs_gradients(args, kwargs):
            # torch's own attention might have taken its fast path, which rounds in another way.
            raise RuntimeError(
                f"call the attention module itself, not its forward(): {self._message(self._name_of(parameters[0]))}"
            )
        module = calling_module()
        if module in self._modules:
            self._read_by[module].update(dict.fromkeys(numbers))
        if function in _CAST_BY_AUTOCAST and torch.is_grad_enabled() and torch.is_autocast_enabled(self._device.type):
            args, kwargs = self._with_casts(parameters, args, kwargs)
        self._hold(numbers)
        function = WATCHED.get(function, function)
        if any(isinstance(each, Away) for each in parameters):
            return call_unseen(function, args, kwargs)
        return function(*args, **kwargs)

    def bring_to_copy(self, parameter: Tensor) -> None:
        """Bring a parameter that is being copied or pickled, or raise the error."""
        if self._is_in_pass():
            self._hold(self._slices_of[id(parameter)])
        if isinstance(parameter, Away):
            name = self._name_of(parameter)
            raise RuntimeError(f"{self._what} {name!r} cannot be copied while its weights stream; {self._remedy}")

    def _message(self, name: str) -> str:
        return (
            f"{self._what} {name!r} is away: its bytes are on {self._device} only while they are used; {self._remedy}"
        )

    def _name_of(self, parameter: Tensor) -> str:
        return self.names[self._slices_of[id(parameter)][0]]

    def _is_in_pass(self) -> bool:
        return (
            threading.get_ident() in self._passes
            or in_backward()
            or (self.is_active and not self._repeats)
            or calling_module() in self._modules
        )

    def _has_entered(self, numbers: Iterable[int]) -> bool:
        """Return whether this thread is in visits of storages."""
        thread = threading.get_ident()
        visits = [each for each in list(self._outside_visits.values()) if each.thread == thread]
        own = {*self.open_visits.of_present_pass(), self._passes.get(thread), self._outside.get(thread), *visits}
        return not any(own.isdisjoint(self.found[number].users) for number in numbers)

    def _hold(self, numbers: Iterable[int], cast: CastWeight | None = None) -> None:
        """Keep storages, or a cast of one, on the device until the present pass and its backward are over."""
        with self.lock:
            user = self._reading_pass()
            for number in numbers:
                user.held[number] = user.held.get(number) or cast
                self.enter(self._other_visits.setdefault((number,), (number,)), user, cast)

    def _with_casts(self, parameters: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Replace weights that train by the casts that their modules have used in the present autocast context.

        Gradients of all uses of one cast add up before it is cast back. From the next pass on autocast casts them.
        """
        casts: dict[int, Tensor] = {}
        context = self._contexts.present()
        for parameter in parameters:
            cast = self._casts.get((id(parameter), torch.get_autocast_dtype(self._device.type)))
            if cast is not None and parameter.requires_grad and cast.is_in_graph(context):
                self._hold(self._slices_of[id(parameter)], cast)
                casts[id(parameter)] = cast.in_graph(parameter)
            self._cast_by_torch.add(id(parameter))
        return tree_map_only(Tensor, lambda each: casts.get(id(each), each), (args, kwargs))

    def _reading_pass(self) -> "Pass | _BackwardReads":
        """Return the user of what is read now: held until the end of the backward pass, or of the thread's own pass."""
        if in_backward():
            user = _BackwardReads(self)
            user.open()
            return user
        thread = threading.get_ident()
        return self._passes.get(thread) or self._outside.setdefault(thread, Pass(self.open_visits.num_ended))

    def _rows(self, table: Tensor, indices: Tensor, padding: int, is_scaled: bool) -> Tensor:
        """Look rows up at home; that of `padding` has no gradient, and `is_scaled` has gradients divided by counts."""
        number, place = self._places[id(table)]

        def looked_up() -> Tensor:
            with torch._C._DisableFuncTorch(), self._without_modes():
                self.found[number].flush()
                return self._home.rows(number, place, indices)

        if not (torch.is_grad_enabled() and table.requires_grad):
            return looked_up()
        rows: Tensor = _rows(table, indices, looked_up, padding, is_scaled)
        return rows

    # -------------------------------------------------------------------------------------------- visits

    def _extend_units(self) -> None:
        """Make modules visit what was read while they ran, from the next call on."""
        while self._read_by:
            module, numbers = self._read_by.popitem()
            unit = self._units.get(module)
            visit = unit.visit if unit is not None else ()
            wanted = tuple(dict.fromkeys((*visit, *numbers)))
            if wanted != visit:
                if unit is not None:
                    unit.remove()
                self._units[module] = Unit(module, wanted, self)

    def enter(self, visit: Visit, user: object, cast: CastWeight | None = None, is_model: bool = True) -> None:
        # `torch.func` forbids writes to memory that it does not track; modes would see copies, and record them.
        with self.lock, torch._C._DisableFuncTorch(), self._without_modes():
            if is_model and self.when_entered is not None:
                self.when_entered(visit)
            self.storages.enter(visit, user, cast, is_model)
            self._show(visit)

    def leave(self, visit: Visit, user: object, cast: CastWeight | None = None, outputs: Iterable[Tensor] = ()) -> None:
        with self.lock, torch._C._DisableFuncTorch(), self._without_modes():
            for number in visit:
                written = self.found[number]
                if written.is_written() and not written.note_written():  # which `remove` then puts onto the device
                    self.storages.keep(number, WRITTEN)
            self._keep_handed_out(visit, outputs)
            self.storages.leave(visit, user, cast)
            if not self._passes and not in_backward():
                self._home.trim()

    def _show(self, visit: Visit) -> None:
        """Allow threads to read the weights of a visit without asking, unless there are several."""
        thread = threading.get_ident()
        if thread != self._only_thread:
            outside = {each.thread for each in self._outside_visits.values()}
            are_several = bool((self._passes.keys() | self.open_visits.threads | outside) - {thread})
            if are_several and self._only_thread is not None:
                for storage in self.found:
                    storage.rest()
            self._only_thread = None if are_several else thread
        for number in visit:
            storage = self.found[number]
            if number in self._always_shown:
                storage.show(are_watched=False)
            elif self._only_thread is not None and storage.users:
                storage.show()

    def _without_modes(self) -> AbstractContextManager[Any]:
        """Enclose work that modes of torch's dispatcher must not see, where it is not simulated by one."""
        is_seen = is_in_torch_dispatch_mode() and not self._is_simulated
        return _disable_current_modes() if is_seen else _NOTHING

    def refuse_writes(self, visit: Visit) -> None:
        """Raise RuntimeError if weights of a visit were written and would be lost."""
        for number in visit:
            if self.found[number].is_written() and not self.found[number].note_written():
                name = self.names[number]
                raise RuntimeError(f"{self._what} {name!r} was written while it streams; {self._remedy_of_writes}")

    def _is_held(self, number: int) -> bool:
        return self.found[number].is_held_by_others()

    def _note_written(self, numbers: Iterable[int]) -> None:
        """Take note that weights may have been written; torch does not count all writes."""
        for number in numbers:
            self.found[number].note_written(is_sure=self.found[number].is_written())

    def _release(self, user: Any) -> None:
        self._note_written(user.held)
        while user.held:
            number, cast = next(reversed(user.held.items()))
            self.leave((number,), user, cast)
            user.held.popitem()

    def _when_ended(self) -> None:
        with self.lock:
            if not self._passes:
                self._end_pass()

    def _end_pass(self) -> None:
        self.storages.end()
        self._home.trim()

    def _keep_handed_out(self, visit: Visit, outputs: Iterable[Tensor]) -> None:
        """Keep those storages of a visit of which a module has returned a view: any code may read it."""
        keys = {self.found[number].key: number for number in visit}
        for tensor in outputs:
            memory = _without_transforms(tensor)
            if is_plain(memory) and memory.untyped_storage()._cdata in keys:
                self.storages.keep(keys[memory.untyped_storage()._cdata], "returned by its module")

    def may_be_cast(self, visit: Visit, weight: Any) -> bool:
        """Return whether a weight is the only one of its visit, and autocast casts such."""
        is_alone = len(visit) == 1 and all(tensor is weight for tensor in self.found[visit[0]].tensors)
        return is_alone and weight.is_floating_point() and weight.dtype is not torch.float64

    def cast_of(self, visit: Visit, weight: Any) -> CastWeight | None:
        """Return the cast that autocast would make of a weight, the only one of its visit."""
        kind = weight.device.type
        if not torch.is_autocast_enabled(kind):
            return None
        dtype = torch.get_autocast_dtype(kind)
        if weight.dtype is dtype or not self.may_be_cast(visit, weight):
            return None
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if weight.requires_grad and (is_transformed or id(weight) in self._cast_by_torch):
            return None
        storage = self.found[visit[0]]
        with self.lock:
            key = id(weight), dtype
            if key not in self._casts:
                with self._without_modes():
                    self._casts[key] = CastWeight(storage, dtype, self._copier, self._contexts)
            return self._casts[key]


class _BackwardReads(BackwardVisit):
    """The user of what a backward pass reads outside of visits: of the storages that it holds so far."""

    def __init__(self, visiting: Visiting) -> None:
        self.held: dict[int, CastWeight | None] = {}
        super().__init__(self.held, lambda user: None, visiting._release, visiting.open_visits)


class _Rows(torch.autograd.Function):
    """Rows of a table that trains, looked up at home; the gradient needs no more than the length of the table."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, indices: Tensor, looked_up: Callable[[], Tensor], padding: int, is_scaled: bool
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.length, ctx.padding, ctx.is_scaled = len(table), padding, is_scaled
        return looked_up()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_table = torch.ops.aten.embedding_dense_backward(
            gradient, ctx.saved_tensors[0], ctx.length, ctx.padding, ctx.is_scaled
        )
        return of_table, None, None, None, None


_rows: Any = _Rows.apply


def _looked_up(function: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, int, bool] | None:
    """Return the arguments of `Visiting._rows` if a function looks up a few rows of an embedding, else None.

    What torch traces needs the function itself: the rows would be a constant of the trace.
    """
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if torch._C._get_tracing_state() or (tracing is not None and tracing.get_proxy_mode() is not None):
        return None
    names = {
        functional.embedding: "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
        torch.embedding: "weight input padding_idx scale_grad_by_freq sparse",
    }
    given = dict(zip(names.get(function, "").split(), args, strict=False)) | kwargs
    table, indices = given.get("weight"), given.get("input", given.get("indices"))
    if table is None or indices is None or given.get("max_norm") is not None:
        return None
    is_read_on_the_host = is_plain(indices) and not torch._C._functorch.is_functorch_wrapped_tensor(indices)
    if table.dim() != 2 or not is_read_on_the_host or indices.numel() >= table.shape[0]:
        return None
    needs_torch = given.get("sparse") or torch._C._functorch.peek_interpreter_stack() is not None
    if needs_torch and torch.is_grad_enabled() and table.requires_grad:
        return None
    padding = given.get("padding_idx")
    padding = -1 if padding is None else padding + len(table) * (padding < 0 and function is functional.embedding)
    return table, indices, padding, bool(given.get("scale_grad_by_freq"))


def _needs_gradients(args: Any, kwargs: Any) -> bool:
    return torch.is_grad_enabled() and any(
        getattr(each, "requires_grad", False) for each in tree_leaves((args, kwargs))
    )


def _without_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor inside of those that `torch.func` wraps it in."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
