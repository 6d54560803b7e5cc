"""Modules that visit storages of frozen weights: at each call, and when autograd runs the nodes of that call.

    forward     x -> enter -> the module's operations -> leave -> y
    backward    close <-- nodes of those operations <-- open

Each node that the call has made opens a visit before it runs: the outputs' own nodes would not do, since a write in
place takes a view's node out of the graph, and a loss may be computed from something else than outputs.

The nodes of a module that calls one operator run in a row, and the last one closes the visit. Elsewhere some may not
run, and the nodes behind the inputs close it: they have lower numbers than those of the operations, and autograd runs
the node with the highest number first. Where all inputs are leaves or without a gradient, the last node of the call
closes it, if all of them run, and else backward's end.
"""

import copyreg
from collections.abc import Buffer, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hf_memopt.autograd_state import next_node
from hf_memopt.uncompiled import graph_break, uncompiled
from hf_memopt.weights.residency.backward_visits import BackwardVisit
from hf_memopt.weights.residency.guards import OF_ALL_MODULES, NotCopied
from hf_memopt.weights.residency.resident_set import Visit

# Their forward hands input and weight to one operator, which autocast runs in its dtype, and reads them nowhere else.
_ONE_OPERATOR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Objects that are searched for tensors: how deep, and how many of one container.
_DEPTH, _MOST = 4, 1000
# Text, numbers and memory, and modules, which hand their own results out.
_WITHOUT_TENSORS = (str, int, float, Buffer, range, nn.Module, type)
# The attribute of a module whose class visits.
_UNIT = "_hf_memopt_unit"


class Unit(NotCopied):
    """A module whose calls are visits of the storages `visit`. The calls of a copied module are none.

    Args:
        visits: the engine, a `Visiting`.
    """

    def __init__(self, module: nn.Module, visit: Visit, visits: Any) -> None:
        self.module, self.visit = module, visit
        self._visits = visits
        self._is_one_operator = type(module) in _ONE_OPERATOR and "forward" not in vars(module)
        self._handles: list[RemovableHandle] = []
        self._is_hidden = module in visits.hidden
        if self._is_hidden or (self._is_one_operator and visits.may_be_cast(visit, module.weight)):
            kind: Any = type(module)
            vars(module)[_UNIT] = self
            module.__class__ = _visiting_class(kind)
        if not self._is_hidden:
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        kind: Any = type(self.module)
        if vars(self.module).pop(_UNIT, None) is not None and kind is _visiting_class(kind.__bases__[0]):
            self.module.__class__ = kind.__bases__[0]

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of the forward of the module's own class."""
        if not self._is_hidden:
            return self._forward(forward, args, kwargs)
        self._enter(self.module, args, kwargs)
        output = None
        try:
            output = self._forward(forward, args, kwargs)
        finally:
            self._leave(self.module, args, kwargs, output)
        return output

    def _forward(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        cast = self._cast_of_call() if self._is_one_operator else None
        return forward(self.module, *args, **kwargs) if cast is None else _operate(self.module, cast, *args, **kwargs)

    @graph_break
    @uncompiled
    def _cast_of_call(self) -> Tensor | None:
        """Return the tensor that the present call computes with in the weight's place.

        Autograd saves that tensor. Of a parameter bound to other memory it would save the parameter, and read in
        backward the memory to which that is bound then.
        """
        calls: list[_Call] = self._visits.open_visits.calls
        return calls[-1].cast if calls and calls[-1].module is self.module else None

    @graph_break
    @uncompiled
    def _enter(self, module: Any, args: Any, kwargs: Any) -> None:
        visits = self._visits
        if module is not self.module or not visits.is_active:
            return
        cast = visits.cast_of(self.visit, module.weight) if self._is_one_operator else None
        enter = partial(visits.enter, self.visit, cast=cast)
        leave = partial(visits.leave, self.visit, cast=cast)
        backward = BackwardVisit(self.visit, enter, leave, visits.open_visits)
        used: Tensor | None = None
        if cast is not None:
            weight: Any = module.weight
            trains = torch.is_grad_enabled() and weight.requires_grad
            used = cast.in_graph(weight) if trains else cast.tensor
        call = _Call(module, self._is_one_operator, leave, backward, used)
        visits.open_visits.calls.append(call)
        enter(call)
        if torch.is_grad_enabled() and not self._is_one_operator:
            call.close_after((args, kwargs))

    @graph_break
    @uncompiled
    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # Runs too where an exception came before the module was entered.
        calls = self._visits.open_visits.calls
        if any(call.module is module for call in calls):
            while calls[-1].module is not module:  # what an exception has left
                calls[-1].end()
                calls.pop()
            calls[-1].finish((args, kwargs), output)
            calls.pop()
            if output is not None:  # which it is after an exception
                self._visits.refuse_writes(self.visit)


def _operate(module: Any, weight: Tensor, input: Tensor) -> Tensor:
    """Do what the forward of a module of one operator does, with another weight."""
    if isinstance(module, nn.Linear):
        return functional.linear(input, weight, module.bias)
    result: Tensor = module._conv_forward(input, weight, module.bias)
    return result


@cache
def _visiting_class(kind: Any) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit: Unit = vars(self)[_UNIT]
        if unit.module is not self:  # a copy of the module
            return kind.forward(self, *args, **kwargs)
        return unit.run(kind.forward, args, kwargs)

    return type(kind)(kind.__name__, (kind,), {"forward": wraps(kind.forward)(forward), "__module__": kind.__module__})


@dataclass(eq=False)
class _Call:
    """One call of a module: leaves its visit when it ends, and has its nodes open another one in backward."""

    module: nn.Module
    is_one_operator: bool
    leave: Callable[..., None]
    backward: BackwardVisit
    cast: Tensor | None
    has_inputs: bool = False  # with nodes behind them
    first_node: int = field(default_factory=next_node)  # nodes made during the call have at least this number

    def close_after(self, inputs: Any) -> None:
        """Make the nodes behind inputs close the visit in backward."""
        for node in {tensor.grad_fn for tensor in tree_leaves(inputs) if isinstance(tensor, Tensor)}:
            if node is not None:
                node.register_prehook(self.backward.close)
                self.has_inputs = True

    def finish(self, inputs: Any, output: Any) -> None:
        """End the visit, and have the nodes of the call open another one in backward."""
        outputs = list(_tensors_in(output))
        if next_node() != self.first_node:
            others = () if self.is_one_operator else self._handed_out_otherwise(inputs)
            nodes = list(self._nodes((*outputs, *others)))
            for node in nodes:
                node.register_prehook(self.backward.open)
            if self.is_one_operator or not self.has_inputs:
                self.backward.close_after(nodes)
        self.end(outputs)

    def _handed_out_otherwise(self, inputs: Any) -> Iterator[Tensor]:
        """Yield the tensors that others find in the module's attributes, or in a container that they have passed."""
        attributes = {
            name: each for name, each in vars(self.module).items() if name not in OF_ALL_MODULES
        }  # which hold no results
        return _tensors_in((inputs, attributes))

    def end(self, outputs: Iterable[Tensor] = ()) -> None:
        self.leave(self, outputs=outputs)

    def _nodes(self, tensors: Iterable[Tensor]) -> Iterator[Any]:
        """Yield the nodes that the call has made, as far as tensors lead to them."""
        waiting = [tensor.grad_fn for tensor in tensors]
        seen: set[Any] = set()
        while waiting:
            node: Any = waiting.pop()
            if node is None or node in seen or node._sequence_nr() < self.first_node:
                continue
            seen.add(node)
            following = node.next_functions
            if following:  # a leaf's node, which has none, is no call's
                yield node
                waiting.extend(each for each, _ in following)


def _tensors_in(found: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in an object: in collections, and in the attributes of objects of any class but modules."""
    if isinstance(found, Tensor):
        yield found
        return
    if depth == 0 or isinstance(found, _WITHOUT_TENSORS) or callable(found):
        return
    slots = copyreg._slotnames(type(found))  # type: ignore[attr-defined]
    inside = [*getattr(found, "__dict__", {}).values(), *(getattr(found, name, None) for name in slots)]
    if isinstance(found, Collection):
        inside += islice(found.values() if isinstance(found, Mapping) else found, _MOST)
    for each in inside[:_MOST]:
        yield from _tensors_in(each, depth - 1)
