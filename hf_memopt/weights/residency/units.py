"""Modules that visit storages of frozen weights: at each call, and when autograd runs the nodes of that call.

    forward     x -> enter -> the module's operations -> leave -> y
    backward    close <-- nodes of those operations <-- open

The nodes behind the outputs open a visit before they run. The nodes behind the inputs have lower numbers than those of
the operations. Autograd runs the node with the highest number first, so when one of an input's runs, the others are
over. Where all inputs are leaves or without a gradient, backward's end closes the visit.

An input that others read too, as a decoder's layers read the encoder's output, has its node run late. So a module that
reads its input once gets a view of it, with a node of its own. Elsewhere that would change the order in which
gradients are added up, and with it their rounding.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_memopt.autograd_state import next_node
from hf_memopt.uncompiled import graph_break, uncompiled
from hf_memopt.weights.residency.backward_visits import BackwardVisit, OpenVisits
from hf_memopt.weights.residency.resident_set import ResidentSet
from hf_memopt.weights.residency.storages import CastWeight, StreamedStorage
from hf_memopt.weights.residency.visit_order import Visit

# Their forward hands input and weight to one operator, which autocast runs in its dtype, and reads them nowhere else.
_ONE_OPERATOR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Hooked:
    """Hooks around each call of a module, until they are removed."""

    def __init__(self, module: nn.Module, enter: Callable[..., Any], leave: Callable[..., None]) -> None:
        self._handles = [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Unit(_Hooked):
    """A module whose calls are visits of the storages `visit`."""

    def __init__(self, module: nn.Module, visit: Visit, storages: ResidentSet, open_visits: OpenVisits) -> None:
        self.visit = visit
        self._storages, self._open_visits = storages, open_visits
        self._is_one_operator = type(module) in _ONE_OPERATOR and "forward" not in vars(module)
        self._may_cast = self._is_one_operator and (
            all(tensor is module.weight for number in visit for tensor in storages.storages[number].tensors)
        )
        self._calls: list[_Call] = []
        super().__init__(module, self._enter, self._leave)

    @graph_break
    @uncompiled
    def _enter(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        cast = self._cast_of(module.weight) if self._may_cast else None
        enter = partial(self._storages.enter, self.visit, cast)
        leave = partial(self._storages.leave, self.visit, cast)
        enter()
        call = _Call(leave, BackwardVisit(enter, leave, self._open_visits) if torch.is_grad_enabled() else None)
        if cast is not None:
            call.replace_weight(module, cast.tensor)
        self._calls.append(call)
        if call.backward is None:
            return None
        if self._is_one_operator and args:
            return (call.view_of(args[0]), *args[1:]), kwargs
        call.close_after(tree_leaves((args, kwargs)))
        return None

    @graph_break
    @uncompiled
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # Runs too where an exception came before the module was entered.
        if self._calls:
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self._storages.keep_handed_out(self.visit, outputs)
            self._calls.pop().end(outputs)

    def _cast_of(self, weight: Any) -> CastWeight | None:
        kind = weight.device.type
        if not torch.is_autocast_enabled(kind) or not weight.is_floating_point() or weight.dtype is torch.float64:
            return None
        dtype = torch.get_autocast_dtype(kind)
        return None if weight.dtype is dtype else self._storages.cast(self.visit[0], weight, dtype)


class _Call:
    """One call of a module: leaves its visit when it ends, and has its nodes open another one in backward."""

    def __init__(self, leave: Callable[[], None], backward: BackwardVisit | None) -> None:
        self._leave, self.backward = leave, backward
        self._restore: Callable[[], object] = _do_nothing
        # Nodes made during the call have at least this number.
        self._first_node = next_node()

    def replace_weight(self, module: nn.Module, tensor: Tensor) -> None:
        """Have a module see another tensor as its weight until the call ends.

        Autograd saves that tensor. Of a parameter bound to other memory it would save the parameter, and read in
        backward the memory to which that is bound then.
        """
        vars(module)["weight"] = tensor  # found before the parameter
        self._restore = partial(vars(module).pop, "weight")

    def view_of(self, tensor: Tensor) -> Tensor:
        """Return a view of an input, whose node closes the visit in backward."""
        assert self.backward is not None
        # Autocast shares one copy of a leaf among its readers, and would not if one had a view.
        if not tensor.requires_grad or tensor.is_leaf:
            return tensor
        view = tensor.view_as(tensor)
        if view.grad_fn is not None:
            view.grad_fn.register_prehook(self.backward.close)
            self._first_node = next_node()
        return view

    def close_after(self, inputs: Iterable[Any]) -> None:
        """Have the nodes behind inputs close the visit in backward."""
        assert self.backward is not None
        nodes = {tensor.grad_fn for tensor in inputs if isinstance(tensor, Tensor)}
        for node in nodes:
            if node is not None:
                node.register_prehook(self.backward.close)

    def end(self, outputs: Iterable[Tensor]) -> None:
        self._restore()
        self._leave()
        if self.backward is None:
            return
        for tensor in outputs:
            node = tensor.grad_fn
            if node is not None and node._sequence_nr() >= self._first_node:
                node.register_prehook(self.backward.open)


class TableAtHome(_Hooked):
    """An embedding whose rows are looked up where its table lives.

    Args:
        module: an `nn.Embedding`, or a descendant.
        storage: of its table.
        in_place: the table at its home, as the device reads it; None where it cannot.
        at_home: the same, as the host reads it.
    """

    def __init__(self, module: nn.Module, storage: StreamedStorage, in_place: Tensor | None, at_home: Tensor) -> None:
        self._storage, self._in_place, self._at_home = storage, in_place, at_home
        self._ends: list[Callable[[], None]] = []
        super().__init__(module, self._enter, self._leave)

    @graph_break
    @uncompiled
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        weight: Any = module.weight
        if self._in_place is not None:
            weight.data = self._in_place
            self._ends.append(self._storage.bind)
        else:
            rows: Any = _GatheredRows(weight, self._at_home)
            rows.__enter__()
            self._ends.append(partial(rows.__exit__, None, None, None))

    @graph_break
    @uncompiled
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._ends:
            self._ends.pop()()


class _GatheredRows(TorchDispatchMode):
    """Looks rows of one table up where it lives, on the host. Costs a wait for the indices."""

    def __init__(self, table: Tensor, at_home: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table, self._at_home = table, at_home

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.embedding.default and args[0] is self._table:
            return func(self._at_home, args[1].cpu(), *args[2:], **(kwargs or {})).to(args[1].device)
        return func(*args, **(kwargs or {}))


def _do_nothing() -> None: ...
