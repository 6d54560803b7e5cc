"""Modules that visit storages of frozen weights: at each call, and when autograd runs the nodes of that call.

    forward     enter | x' = view of x | the module's operations | leave
    backward                    close <- nodes of those operations <- open

The nodes behind the outputs open a visit before they run. The node of the view of an input has a lower number than
those of the operations. Autograd runs the node with the highest number first, so when that one runs, the others are
over. Where all inputs are leaves or without a gradient there is no such node, and backward's end closes the visit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from hf_memopt.autograd_state import next_node
from hf_memopt.uncompiled import uncompiled
from hf_memopt.weights.residency.backward_visits import BackwardVisit, OpenVisits
from hf_memopt.weights.residency.resident_set import ResidentSet
from hf_memopt.weights.residency.storages import CastWeight, StreamedStorage
from hf_memopt.weights.residency.visit_order import Visit

# Their forward hands the weight to one operator, which autocast runs in its dtype, and reads it nowhere else.
_CAST_BY_AUTOCAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Unit:
    """A module whose calls are visits of the storages `visit`."""

    def __init__(self, module: nn.Module, visit: Visit, storages: ResidentSet, open_visits: OpenVisits) -> None:
        self.visit = visit
        self._storages, self._open_visits = storages, open_visits
        self._may_cast = type(module) in _CAST_BY_AUTOCAST and "forward" not in vars(module) and len(visit) == 1
        self._calls: list[_Call] = []
        self._handles = register(module, self._enter, self._leave)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @uncompiled
    def _enter(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        cast = self._cast_of(module.weight) if self._may_cast else None
        enter = partial(self._storages.enter, self.visit, cast)
        leave = partial(self._storages.leave, self.visit, cast)
        enter()
        call = _Call(leave, BackwardVisit(enter, leave, self._open_visits) if torch.is_grad_enabled() else None)
        if cast is not None:
            call.rebind(module.weight, cast.tensor, self._storages.storages[self.visit[0]])
        self._calls.append(call)
        return None if call.backward is None else call.mark(args, kwargs)

    @uncompiled
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # Runs too where an exception came before the module was entered.
        if self._calls:
            self._calls.pop().end(output)

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
        self._restore: Callable[[], None] = _do_nothing
        # Nodes made during the call have at least this number.
        self._first_node = next_node()
        self._is_marked = False

    def rebind(self, weight: Tensor, tensor: Tensor, storage: StreamedStorage) -> None:
        """Point a weight of a storage at another tensor until the call ends."""
        weight.data = tensor
        self._restore = storage.bind

    def mark(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments with a view in place of each tensor with a gradient; its node closes the visit."""
        marked = tree_map_only(Tensor, self._marked, (args, kwargs))
        self._first_node = next_node()
        return marked if self._is_marked else None

    def end(self, output: Any) -> None:
        self._restore()
        self._leave()
        if self.backward is None:
            return
        for leaf in tree_leaves(output):
            node = leaf.grad_fn if isinstance(leaf, Tensor) else None
            if node is not None and node._sequence_nr() >= self._first_node:
                node.register_prehook(self.backward.open)

    def _marked(self, tensor: Tensor) -> Tensor:
        # Autocast shares one copy of a leaf among its readers, and would not if some had a view.
        if tensor.is_leaf or not tensor.requires_grad or tensor.layout is not torch.strided:
            return tensor
        view = tensor.view_as(tensor)
        if view.grad_fn is not None:
            assert self.backward is not None
            view.grad_fn.register_prehook(self.backward.close)
            self._is_marked = True
        return view


class Table:
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
        self._handles = register(module, self._enter, self._leave)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

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


def register(module: nn.Module, enter: Callable[..., Any], leave: Callable[..., None]) -> list[RemovableHandle]:
    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),
    ]


def _do_nothing() -> None: ...
