"""What the offloader leaves in the autograd graph in place of a saved tensor.

The graph owns its payloads, and the payloads own the storages, on the device or on the host. A graph that is used
twice, dropped, or lost to an exception therefore frees what it holds by itself; nothing has to be tracked or reset.

What stays on the device without being counted is a pair, since there may be thousands of small ones: a detached alias
of the saved tensor and its version. (A hook that returned the tensor itself would tie the graph into a reference cycle
with its own output.)
"""

from torch import Tensor

from hf_memopt.activations.saved_tensors.storages import LiveStorage, OffloadedStorage
from hf_memopt.activations.saved_tensors.tensor_views import ViewMeta, modified_in_place

Kept = tuple[Tensor, int]


def keep(tensor: Tensor) -> Kept:
    """What a saved tensor is kept as."""
    return tensor.detach(), tensor._version


class KeptView:
    """A saved tensor as a view of a storage that is counted and stays on the device.

    Attributes:
        read_in: the number of the backward pass that unpacked it last.
    """

    __slots__ = ("_kept", "_storage", "read_in")

    def __init__(self, storage: LiveStorage, tensor: Tensor) -> None:
        self._storage = storage
        self._kept = keep(tensor)
        self.read_in = 0
        storage.num_views += 1

    def restore(self) -> Tensor:
        self._storage.note_use(self)
        return restore_kept(self._kept)

    def __del__(self) -> None:
        self._storage.drop_view()


class Restored(ViewMeta):
    """The same of one that comes back from the host or is computed again."""

    __slots__ = ("_storage", "read_in")

    def __init__(self, storage: LiveStorage, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._storage = storage
        self.read_in = 0
        storage.num_views += 1

    def restore(self) -> Tensor:
        return self.of(self._storage.use(self))

    def let_go(self) -> None:
        """Give up the device memory of what has been offloaded."""
        if isinstance(self._storage, OffloadedStorage):
            self._storage.let_go()

    def __del__(self) -> None:
        self._storage.drop_view()


Payload = Kept | KeptView | Restored


def restore(payload: Payload) -> Tensor:
    """The saved tensor, on its device and ready for the compute stream."""
    return restore_kept(payload) if isinstance(payload, tuple) else payload.restore()


def restore_kept(kept: Kept) -> Tensor:
    """The saved tensor, unless it was modified: saved-tensor hooks switch off autograd's own check."""
    tensor, version = kept
    if tensor._version != version:
        raise modified_in_place(tensor, tensor.shape, version)
    return tensor
