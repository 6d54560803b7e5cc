"""What the offloader leaves in the autograd graph in place of a saved tensor.

The graph owns its payloads, and the payloads own the storages, on the device or on the host. A graph that is used
twice, dropped, or lost to an exception therefore frees what it holds by itself; nothing has to be tracked or reset.
"""

import sys

from torch import Tensor

from hf_memopt.activations.storages import KeptStorage, LiveStorage, OffloadedStorage
from hf_memopt.activations.tensors import ViewMeta, modified_in_place


class Kept:
    """A saved tensor that stays where it is.

    Saved-tensor hooks switch off autograd's own check for in-place modification, so it is made here. Holds a detached
    alias: a hook that returns the tensor itself would tie the graph into a reference cycle with its own output.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def restore(self) -> Tensor:
        if self._tensor._version != self._version:
            raise modified_in_place(self._tensor, self._tensor.shape, self._version)
        return self._tensor


class KeptView(Kept):
    """The same for a storage that is counted."""

    __slots__ = ("_storage", "read_in")

    def __init__(self, storage: KeptStorage, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._storage = storage
        self.read_in = 0
        storage.num_views += 1

    def restore(self) -> Tensor:
        self._storage.note_use(self)
        return super().restore()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._storage.drop_view()


class Restored:
    """A saved tensor as a view of a storage that comes back from the host or is computed again.

    Attributes:
        read_in: the number of the backward pass that unpacked it last.
    """

    __slots__ = ("_meta", "_storage", "read_in")

    def __init__(self, storage: LiveStorage, tensor: Tensor) -> None:
        self._storage = storage
        self._meta = ViewMeta(tensor)
        self.read_in = 0
        storage.num_views += 1

    def restore(self) -> Tensor:
        return self._meta.of(self._storage.use(self))

    def let_go(self) -> None:
        """Give up the device memory of what has been offloaded."""
        if isinstance(self._storage, OffloadedStorage):
            self._storage.let_go()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._storage.drop_view()
