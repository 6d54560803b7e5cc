"""Every tensor storage that Python or an autograd graph holds."""

import gc
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Kinds of holders, beside "parameter" and "tensor".
WITH_GRAPH = "tensor with its graph"
GRADIENT = "gradient"
SAVED = "saved for backward"


class Held(NamedTuple):
    """A tensor on a live storage, and its holder.

    `root` is the tensor of Python's to look for holders of: `tensor` itself if Python holds that, the leaf whose
    `.grad` it is, or the tensor whose graph (or whose gradient's graph) saved it, in the autograd node named `node`.
    """

    tensor: Tensor
    kind: str
    root: Tensor
    node: str = ""


def live_storages() -> dict[int, list[Held]]:
    """Each live storage under the address of its `StorageImpl`, on all devices, with one entry for each kind of holder.

    Python's tensors come first, from the garbage collector's list; those that C++ alone holds from the autograd graphs
    of the former and of their gradients. Packed values of saved-tensor hooks are not unpacked: nothing is fetched or
    recomputed. Not seen: objects hidden by `gc.freeze`, tensors without a strided storage (sparse ones, fake ones), and
    memory that only C++ code outside autograd holds. The result holds the tensors: drop it before the next step. Cost:
    0.1 to 0.2 s for the 440 thousand objects of a process that has imported transformers, and some 20 µs per autograd
    node; no device synchronisation.
    """
    held: dict[int, list[Held]] = {}
    # Without the guard, reading a subclass's attributes would go through its __torch_function__, which may log or fail.
    with torch._C.DisableTorchFunctionSubclass():
        tensors = _python_tensors()
        for tensor in tensors:
            _add(held, Held(tensor, _kind(tensor), tensor))
        for item in _behind(tensors):
            _add(held, item)
    return held


def graph_nodes(starts: Iterable[Tensor], visited: set[Any]) -> Iterator[Any]:
    """Yield the autograd nodes that the graphs of `starts` keep alive, except those in `visited`, which grows."""
    # Not by recursion: graphs of deep models are longer than Python's recursion limit.
    stack = [tensor.grad_fn for tensor in starts if tensor.grad_fn is not None]
    while stack:
        node: Any = stack.pop()
        if node not in visited:
            visited.add(node)
            yield node
            stack.extend(following for following, _ in node.next_functions if following is not None)


# Attributes with saved tensors by type of node: dir() is slow, and types are few.
_RAW_NAMES: dict[type, list[str]] = {}


def saved_values(node: Any) -> Iterator[Any]:
    """Yield what a node has saved: a tensor, the result of its pack hook, or None once backward has freed it."""
    kind = type(node)
    if kind not in _RAW_NAMES:
        _RAW_NAMES[kind] = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    for name in _RAW_NAMES[kind]:
        try:
            raw = getattr(node, name)
        except RuntimeError:  # a custom Function whose saved tensors backward has freed
            continue
        # `data` is the pack hook's result, or the tensor where there was no hook. Without `_raw` the attribute would
        # call the unpack hook, which fetches or recomputes.
        for saved in raw if isinstance(raw, tuple | list) else (raw,):
            yield getattr(saved, "data", None)


def _python_tensors() -> list[Tensor]:
    objects = gc.get_objects()
    # type() and not isinstance, which asks objects for __class__ and sets off deprecation warnings in lazy modules.
    types = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    return [thing for thing in objects if type(thing) in types]


def _kind(tensor: Tensor) -> str:
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    return "tensor" if tensor.grad_fn is None else WITH_GRAPH


def _add(held: dict[int, list[Held]], item: Held) -> None:
    if not torch._C._has_storage(item.tensor):
        return
    storage = item.tensor.untyped_storage()
    if storage.device.type != "meta":
        # One entry per kind is enough to describe a holder, and short for storages with many views.
        known = held.setdefault(storage._cdata, [])
        if all(other.kind != item.kind for other in known):
            known.append(item)


def _behind(tensors: list[Tensor]) -> Iterator[Held]:
    gradients = [(leaf.grad, leaf) for leaf in tensors if leaf.is_leaf and leaf.grad is not None]
    for gradient, leaf in gradients:
        yield Held(gradient, GRADIENT, leaf)
    leaf_of = {id(gradient): leaf for gradient, leaf in gradients}
    visited: set[Any] = set()
    # Graphs overlap, and each node is visited once. Newest tensors come first, so that a graph's saved tensors are put
    # down to its last output, such as the loss, and not to a tensor on the way.
    for start in sorted([*tensors, *(gradient for gradient, _ in gradients)], key=_sequence_number, reverse=True):
        yield from _graph(start, leaf_of.get(id(start), start), visited)


def _sequence_number(tensor: Tensor) -> int:
    return -1 if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()


def _graph(start: Tensor, root: Tensor, visited: set[Any]) -> Iterator[Held]:
    for node in graph_nodes([start], visited):
        for saved in saved_values(node):
            if isinstance(saved, Tensor):
                yield Held(saved, SAVED, root, node.name())
        variable = getattr(node, "variable", None)  # AccumulateGrad owns its leaf, which Python may have dropped
        if variable is not None and variable is not root:
            yield Held(variable, _kind(variable), root)
            if variable.grad is not None:
                yield Held(variable.grad, GRADIENT, root)
