"""The uses of live tensors, the modules that they belong to, and the bytes that autograd keeps for backward."""

import gc
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_memopt.autograd_state import RESHAPING, strided_parts, unwrapped
from hf_memopt.memory.leaks.live_storages import Held, graph_nodes, live_storages, saved_values

PARAMETER = "parameter"
BUFFER = "buffer"
GRADIENT = "gradient"
OPTIMIZER_STATE = "optimizer state"
SAVED = "saved activation"
OTHER = "other"


@dataclass(frozen=True, slots=True)
class LiveTensors:
    """Live storages of one kind, owner, shape and dtype. No tensor is referred to."""

    kind: str
    owner: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    count: int
    num_bytes: int


def live_tensors(model: nn.Module | None, device_type: str) -> list[LiveTensors]:
    """Return all live storages on devices of one type, by their use, largest first; twice the cost of `live_storages`.

    A saved activation belongs to the module whose weight the operation that saved it uses, else to the nearest
    operation with a weight that its input came through. Without a model, parameters are told by their type and have no
    owner. No tensor operation runs, and nothing is unpacked.
    """
    held = live_storages()
    named = _named_uses(model)
    saved = _saved_uses(
        (tensor for items in held.values() for item in items for tensor in (item.tensor, item.root)), named
    )
    sizes: defaultdict[tuple[str, str, tuple[int, ...], torch.dtype], list[int]] = defaultdict(list)
    for address, items in held.items():
        tensor = items[0].tensor
        storage = tensor.untyped_storage()
        is_wrapper = is_traceable_wrapper_subclass(tensor)
        if storage.device.type == device_type and storage.nbytes() and not is_wrapper:
            # The first that knows it: names from the model and the optimizers, the tensor's own type, then the autograd
            # graph. A tensor that an operation saved may be a parameter, and counts as one.
            kind, owner = named.get(address) or _use_by_type(items) or saved.get(address) or (OTHER, "")
            sizes[kind, owner, tuple(tensor.shape), tensor.dtype].append(storage.nbytes())
    found = [LiveTensors(*key, len(of_group), sum(of_group)) for key, of_group in sizes.items()]
    return sorted(found, key=lambda group: -group.num_bytes)


def live_optimizers() -> list[torch.optim.Optimizer]:
    """Every optimizer of torch; one that is wrapped in another, as accelerate does, is there once."""
    # type() and not isinstance, which asks objects for __class__ and sets off deprecation warnings in lazy modules.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]
    return list({id(optimizer.param_groups): optimizer for optimizer in found}.values())


Use = tuple[str, str]  # kind, owner


def _named_uses(model: nn.Module | None) -> dict[int, Use]:
    uses: dict[int, Use] = {}
    names = {}
    for name, parameter in model.named_parameters() if model is not None else ():
        names[id(parameter)] = name
        _note(uses, parameter, PARAMETER, name)
        _note(uses, parameter.grad, GRADIENT, name)
    for name, buffer in model.named_buffers() if model is not None else ():
        _note(uses, buffer, BUFFER, name)
    for optimizer in live_optimizers():
        for updated, state in optimizer.state.items():
            for key, value in state.items():
                _note(uses, value, OPTIMIZER_STATE, f"{names.get(id(updated), '')} {key}".strip())
    return uses


def _note(uses: dict[int, Use], thing: Any, kind: str, owner: str) -> None:
    for tensor in plain_tensors(thing):
        uses.setdefault(tensor.untyped_storage()._cdata, (kind, owner))


def plain_tensors(thing: Any) -> Iterator[Tensor]:
    """Yield the tensors that hold an object's data: its parts if it only wraps tensors, as sharded ones do."""
    if issubclass(type(thing), Tensor):
        yield from filter(torch._C._has_storage, unwrapped(thing))


def _use_by_type(items: list[Held]) -> Use | None:
    # Weights of other modules, or of all without a model.
    kinds = {item.kind for item in items}
    return next(((kind, "") for kind in (PARAMETER, GRADIENT) if kind in kinds), None)


def _saved_uses(tensors: Iterable[Tensor], named: dict[int, Use]) -> dict[int, Use]:
    weights = {address: owner for address, (kind, owner) in named.items() if kind == PARAMETER}
    uses: dict[int, Use] = {}
    for node in graph_nodes(tensors, set()):
        saved = list(_saved_by(node))
        if saved:
            owner = _owner(node, weights)
            for tensor in saved:
                _note(uses, tensor, SAVED, owner)
    return uses


def _saved_by(node: Any) -> Iterator[Tensor]:
    # A pack hook may return any object. Tensors one reference away are found: those of a tuple or of a slotted object.
    for packed in saved_values(node):
        for thing in (packed, *gc.get_referents(packed)):
            yield from plain_tensors(thing)


def _owner(node: Any, weights: dict[int, str]) -> str:
    """Return the operation, and the module of the weight that it or the nearest operation before it uses."""
    label = node.name().removesuffix("Backward0")
    # Breadth first towards the inputs: a mask of dropout, for example, belongs to the linear layer before it.
    queue, visited = deque([node]), {node}
    while queue:
        current = queue.popleft()
        weight = _weight(current, weights)
        if weight is not None:
            module = weight.rpartition(".")[0] or weight
            return f"{module} ({label})" if current is node else f"after {module} ({label})"
        following = [other for other, _ in current.next_functions if other is not None and other not in visited]
        visited.update(following)
        queue.extend(following)
    return f"({label})"


def _weight(node: Any, weights: dict[int, str]) -> str | None:
    for tensor in _saved_by(node):
        name = weights.get(tensor.untyped_storage()._cdata)
        if name is not None:
            return name
    # AccumulateGrad (the node with `variable`) of a weight follows, directly or behind a reshaping.
    for following, _ in node.next_functions:
        current = following
        while current is not None and current.name() in RESHAPING:
            current = current.next_functions[0][0]
        variable = getattr(current, "variable", None)
        for tensor in plain_tensors(variable):
            return weights.get(tensor.untyped_storage()._cdata)
    return None


class SavedBytes:
    """Counts the distinct storages that a forward pass saves for backward, to the byte and on any device.

    Use as a context manager around the forward pass. Sparse tensors count with their indices and values, tensors of
    subclasses with the tensors that they wrap. Saved-tensor hooks do not nest: inside, an inner pair of hooks takes
    over, and checkpointed regions show only their inputs.

    Args:
        exclude: tensors whose storages do not count, usually the model's parameters.
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        # Holds every storage, so that no key is given to a second one while it is counted.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._excluded = {storage._cdata: storage for tensor in exclude for storage in _storages_of(tensor)}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)
        self.total_bytes = 0

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._storages.clear()

    def _count(self, tensor: Tensor) -> Tensor:
        for storage in _storages_of(tensor):
            key = storage._cdata
            if key not in self._excluded and key not in self._storages:
                self._storages[key] = storage
                self.total_bytes += storage.nbytes()
        return tensor


def _storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    for part in unwrapped(tensor):
        for strided in strided_parts(part):
            yield strided.untyped_storage()
