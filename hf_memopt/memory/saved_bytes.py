"""Bytes that autograd keeps for backward."""

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class SavedBytes:
    """Counts the distinct storages that a forward pass saves for backward, to the byte and on any device.

    Sparse tensors count with their indices and values, tensors of subclasses with the tensors that they wrap.

    Args:
        exclude: tensors whose storages do not count, usually the model's parameters.

    Use as a context manager around the forward pass. Saved-tensor hooks do not nest: inside, an inner pair of hooks
    takes over, and checkpointed regions show only their inputs.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._storages.clear()

    def _count(self, tensor: Tensor) -> Tensor:
        for storage in _storages_of(tensor):
            key = storage._cdata
            if key not in self._excluded and key not in self._storages:
                self._storages[key] = storage
                self.total_bytes += storage.nbytes()
        return tensor


def _storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    for part in _parts_of(tensor):
        if part is tensor:
            yield tensor.untyped_storage()
        else:
            yield from _storages_of(part)


def _parts_of(tensor: Any) -> list[Tensor]:
    """Return the tensors that a tensor is made of: itself, if it has memory of its own."""
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for part in parts if isinstance(part, Tensor)]  # a sharded one may also name its mesh
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
