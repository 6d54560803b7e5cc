"""Bytes that autograd keeps for backward."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from hf_memopt.autograd_state import strided_parts, unwrapped


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
