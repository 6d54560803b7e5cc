"""Storages of frozen weights: each has memory while something uses it, and none in between.

The storage stays the same object, so that every alias of it sees the bytes come back: views that autograd has saved,
those in the frames of checkpointed regions, and those in the contexts of custom functions.
"""

import torch
from torch import Tensor

from hf_memopt.autograd_state import bytes_of
from hf_memopt.transfer import Copier, Transfer
from hf_memopt.weights.homes import WeightsHome
from hf_memopt.weights.packed_weights import WeightSlice, bind, views
from hf_memopt.weights.streaming.absent_reads import LARGEST_ITEM, NAN_BYTE, placeholder


class StreamedStorage:
    """The storage of one slice of weights, to which their parameters are bound while it has its bytes.

    Attributes:
        num_bytes: of the storage.
        tensors: the parameters, or the tensors inside quantised ones.
        present: by tensor, its view of the storage.
        key: of the storage, torch's own.
        users: how many rely on the bytes at the moment.
        stays: whether it keeps its memory without users.
    """

    def __init__(self, piece: WeightSlice, home: WeightsHome, device: torch.device, copier: Copier) -> None:
        self.num_bytes = piece.num_bytes
        self.tensors = [each.tensor for each in piece.offsets]
        self.users = 0
        self.stays = False
        self._start, self._home, self._copier = piece.start, home, copier
        self._memory = home.memory(piece, device)
        self._block = self._memory.block
        self.key: int = self._block.untyped_storage()._cdata
        self._offsets = piece.offsets
        self.present = views([each._replace(start=each.start - piece.start) for each in piece.offsets], self._block)
        self._memory.take()
        memory = torch.full((LARGEST_ITEM,), NAN_BYTE, dtype=torch.uint8, device=device)
        self._placeholders = [placeholder(tensor, memory) for tensor in self.tensors]
        # The copy under way, None before and after.
        self._transfer: Transfer | None = None
        self._is_filled = False
        self.bind()

    @property
    def has_memory(self) -> bool:
        return self._memory.is_there

    def fetch(self) -> None:
        """Give it memory and start the copy of its bytes, unless that has been done."""
        if not self.has_memory:
            self._memory.give()
        if not self._is_filled and self._transfer is None:
            self._transfer = self._home.to_device(self._start, self._block)

    def arrive(self) -> None:
        """Have the compute stream wait for the copy, and bind the parameters to the storage."""
        if not self._is_filled:
            transfer, self._transfer = self._transfer, None
            assert transfer is not None
            transfer.wait()
            self._is_filled = True
            self.bind()

    def drop(self) -> None:
        """Bind the parameters to placeholders, and give the memory up. Work submitted so far may still read it."""
        transfer, self._transfer, self._is_filled = self._transfer, None, False
        self.bind()
        try:
            if transfer is not None:
                transfer.wait()  # the memory must not go to others before
        finally:
            self._copier.release(self._block)
            self._memory.take()

    def bind(self) -> None:
        """Bind the parameters to the storage if it has its bytes, else to placeholders."""
        bind(self._offsets, self.present if self._is_filled else self._placeholders)

    def follow(self, place: int, tensor: Tensor) -> None:
        """Bind another tensor in the place of one: a quantised weight has new ones inside after each `to(device)`."""
        self.tensors[place] = tensor
        self._offsets = tuple(
            each._replace(tensor=found) for each, found in zip(self._offsets, self.tensors, strict=True)
        )
        self.bind()

    def is_bound(self) -> bool:
        """Return whether the parameters are bound as this object has left them."""
        bound = self.present if self._is_filled else self._placeholders
        return all(_same_memory(*pair) for pair in zip(self.tensors, bound, strict=True))


class CastWeight:
    """A weight in another dtype, as autocast makes it, from the bytes of its storage.

    Autograd would keep autocast's own copy from forward to backward, as it is not the weight. This one comes and goes.

    Attributes:
        num_bytes: of its storage.
        tensor: the weight in the other dtype.
        users: how many rely on it at the moment.
    """

    def __init__(self, original: Tensor, dtype: torch.dtype, copier: Copier) -> None:
        self.num_bytes = original.numel() * dtype.itemsize
        self.users = 0
        self._original, self._copier = original, copier
        self.tensor = torch.empty_strided(original.size(), original.stride(), dtype=dtype, device=original.device)
        self._block = bytes_of(self.tensor)
        self._storage = self._block.untyped_storage()
        self._storage.resize_(0)

    @property
    def has_memory(self) -> bool:
        return self._storage.nbytes() > 0

    def make(self) -> None:
        """Give it memory and cast the weight, which must be there."""
        self._storage.resize_(self.num_bytes)
        with torch.no_grad():
            self.tensor.data.copy_(self._original)

    def drop(self) -> None:
        self._copier.release(self._block)
        self._storage.resize_(0)


def _same_memory(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and first.untyped_storage()._cdata == second.untyped_storage()._cdata
