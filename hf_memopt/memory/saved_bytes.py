"""Bytes that autograd keeps for backward."""

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor


class SavedBytes:
    """Counts the distinct storages that a forward pass saves for backward, to the byte and on any device.

    Args:
        exclude: tensors whose storages do not count, usually the model's parameters.

    Use as a context manager around the forward pass. Saved-tensor hooks do not nest: inside, an inner pair of hooks
    takes over, and checkpointed regions show only their inputs.
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in exclude}
        # Holds every storage, so that no address is given to a second one while it is counted.
        self._storages: dict[int, torch.UntypedStorage] = {}
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
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._excluded and address not in self._storages:
            self._storages[address] = storage
            self.total_bytes += storage.nbytes()
        return tensor
