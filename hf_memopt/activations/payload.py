"""What the offloader leaves in the autograd graph in place of a saved tensor.

The graph owns its payloads, and the payloads own the host memory. A graph that is used twice, dropped, or lost to an
exception therefore frees what it holds by itself; nothing has to be tracked or reset.
"""

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memopt.transfer import Copier, Transfer
from hf_memopt.transfer.host_arena import HostArena

if TYPE_CHECKING:
    from hf_memopt.activations.schedule import ForwardPass


class VersionGuard:
    """Notices in-place modification of a tensor without keeping its memory.

    A detached alias shares the version counter; giving it other data does not change that (canary-tested).
    """

    __slots__ = ("_alias", "_shape", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._alias = tensor.detach()
        self._alias.data = tensor.new_empty(0)
        self._shape = tensor.shape
        self._version = tensor._version

    def was_modified(self) -> bool:
        return self._alias._version != self._version

    def check(self) -> None:
        if self.was_modified():
            raise _modified_in_place(self._shape)


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
            raise _modified_in_place(self._tensor.shape)
        return self._tensor


class Offloaded:
    """A saved tensor as a view of an offloaded storage."""

    __slots__ = ("_conj", "_dtype", "_neg", "_offset", "_size", "_storage", "_stride", "_unpacked")

    def __init__(self, storage: "OffloadedStorage", tensor: Tensor) -> None:
        self._storage = storage
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._stride = tensor.size(), tensor.stride()
        self._conj, self._neg = tensor.is_conj(), tensor.is_neg()
        self._unpacked = False
        storage.num_waiting_views += 1

    def let_go(self) -> None:
        """Give up the device memory of the whole storage."""
        self._storage.let_go()

    def restore(self) -> Tensor:
        # A view that is unpacked again (retain_graph) no longer counts, so the storage may have left in between.
        first = not self._unpacked
        self._unpacked = True
        memory = self._storage.fetch(counted=first)
        view = torch.empty(0, dtype=self._dtype, device=memory.device)
        view.set_(memory.untyped_storage(), self._offset, self._size, self._stride)
        view = torch._conj(view) if self._conj else view
        return torch._neg_view(view) if self._neg else view


class OffloadedStorage:
    """One device storage on its way to the host, on the host, or on its way back.

    Args:
        tensor: any view of the storage; its version counter is the storage's.
        block: host memory of the storage's size. Returned to `arena` when this object dies.
        arena: owner of the block.
        copier: moves the bytes.
        forward: the forward pass that saved it, which knows what will be needed next.
    """

    def __init__(self, tensor: Tensor, block: Tensor, arena: HostArena, copier: Copier, forward: "ForwardPass") -> None:
        self._arena = arena
        self._block = block
        self._outgoing: Transfer | None = None
        self._incoming: Transfer | None = None
        self._source: Tensor | None = tensor.detach()
        self._guard = VersionGuard(tensor)
        self._weak_source = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._copier = copier
        self._forward = forward
        self._memory: Tensor | None = None
        self.num_waiting_views = 0
        self._outgoing = copier.to_host(_bytes_of(tensor), block)
        self.ordinal = forward.add(self)

    @property
    def num_bytes(self) -> int:
        return self._block.nbytes

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a view of the very bytes that were copied."""
        alive = not self._weak_source.expired()  # type: ignore[no-untyped-call]
        return alive and not self._guard.was_modified()

    def has_left(self) -> bool:
        """Whether the copy to the host is known to be over."""
        return self._outgoing is not None and self._outgoing.done()

    def let_go(self) -> None:
        """Give up the device memory; compute that reuses it is ordered after the copy."""
        if self._source is not None:
            assert self._outgoing is not None
            self._outgoing.wait()
            self._source = None

    def prefetch(self) -> None:
        """Start bringing the bytes back, unless they are here or on their way."""
        if self._source is None and self._memory is None:
            memory = self._copier.empty_device(self.num_bytes)
            self._incoming = self._copier.to_device(self._block, memory)
            self._memory = memory

    def fetch(self, counted: bool) -> Tensor:
        """The bytes on the device, `(num_bytes,)` uint8, ready for the compute stream.

        Args:
            counted: whether this serves a view for the first time. With the last such view the device copy goes.
        """
        self._guard.check()
        self.prefetch()  # before those that follow, if nobody has asked for it yet
        self._forward.about_to_use(self)
        memory = _bytes_of(self._source) if self._source is not None else self._arrive()
        self.num_waiting_views -= counted
        if self.num_waiting_views == 0:
            # The view in use keeps the memory alive; it returns to the allocator in the order of the compute stream.
            self._memory = None
        return memory

    def _arrive(self) -> Tensor:
        assert self._memory is not None
        if self._incoming is not None:
            self._incoming.wait()
            self._incoming = None
        return self._memory

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        # The host block is written or read until both copies are over.
        for transfer in (self._outgoing, self._incoming):
            if transfer is not None:
                transfer.wait()
        self._arena.release(self._block)


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _modified_in_place(shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        f"a tensor of shape {tuple(shape)} that autograd saved for backward has been modified by an in-place "
        "operation; clone it before the modification, or modify a copy"
    )
