"""The storages behind saved tensors, and how each is had again in backward: kept, or copied to the host and back.

The third way, computing it again, is in `recompute.py`.
"""

import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from hf_memopt.activations.callers import refuse_rrelu
from hf_memopt.activations.saved_tensors.device_bytes import graph_is_retained
from hf_memopt.activations.saved_tensors.tensor_views import StoragePin, VersionGuard, bytes_of
from hf_memopt.transfer import Transfer

if TYPE_CHECKING:
    from hf_memopt.activations.saved_tensors.forward_pass import ForwardPass


class View(Protocol):
    """A saved tensor; `read_in` is the number of the backward pass that unpacked it last."""

    read_in: int


class LiveStorage(VersionGuard, ABC):
    """One device storage that a forward pass saved.

    A backward that frees its graph lets go of each saved tensor once it has used it, and with the last of them goes
    this object and all that it holds. Only where the graph is retained is there anything to count: then what a backward
    brought back goes after its last use in that backward.

    Args:
        tensor: a view of the storage that shares the version counter of all that are to be views of this object.
        forward: the pass that saved it, which knows what will be needed next.
        index: its place in the pass.
    """

    __slots__ = (
        "__weakref__",
        "_num_left",
        "forward",
        "index",
        "is_weight",
        "key",
        "num_bytes",
        "num_dependents",
        "num_views",
        "num_writes",
        "pin",
        "read_in",
        "saved_by",
    )

    # Whether its kind stays on the device.
    is_kept: ClassVar[bool] = False

    def __init__(self, tensor: Tensor, forward: "ForwardPass", index: int) -> None:
        super().__init__(tensor)
        storage = tensor.untyped_storage()
        self.forward, self.index = forward, index
        self.num_bytes = storage.nbytes()
        # Those that are alive: saved tensors, and storages that are still to be computed from this one.
        self.num_views = self.num_dependents = 0
        # The pass that autograd last saved it in; None while it is only there to compute others from.
        self.saved_by: ForwardPass | None = None
        # Whether it is a copy of a weight that its module keeps for good.
        self.is_weight = False
        # How many writes to its memory had been seen when it was saved, where they are watched.
        self.num_writes: int | None = None
        # The backward that read it last, and, if that retains its graph, how many have not read it there yet.
        self.read_in = self._num_left = 0
        self.key = storage._cdata
        # As long as this exists, no other storage is given the same key, however dead this one is.
        self.pin = StoragePin.of(storage)

    def use(self, view: View) -> Tensor:
        """`fetch` for a saved tensor that autograd unpacks."""
        forward = self.forward
        backward = forward.note_backward()
        is_first = view.read_in != backward
        view.read_in = backward
        recorder = forward.recorder
        if recorder is None or backward == 0 or not is_first:
            return self.fetch(backward, is_first)
        with recorder.using(self.index):
            return self.fetch(backward, is_first)

    def fetch(self, backward: int, is_first: bool) -> Tensor:
        """The bytes on the device, `(num_bytes,)` uint8, ready for the compute stream.

        Args:
            backward: the number of the backward at work, 0 for none.
            is_first: whether the saved tensor, or the storage to be computed, asks for the first time in it.
        """
        self.check()
        memory = self._bring(backward)
        if graph_is_retained():
            self._count_read(backward, is_first)
        self.read_in = backward
        return memory

    def note_use(self, view: View) -> None:
        """A saved tensor is unpacked, of which nothing has to be fetched."""
        backward = self.forward.note_backward()
        recorder = self.forward.recorder
        if recorder is not None and view.read_in != backward:
            with recorder.using(self.index):
                view.read_in = backward

    def drop_view(self) -> None:
        """A saved tensor is gone."""
        self.num_views -= 1
        if self.num_views == 0 and self.forward.recorder is not None and not sys.is_finalizing():
            self.forward.recorder.freed(self.index)

    def end_backward(self, backward: int) -> None:
        """What a backward has read is not kept for another one."""
        if self.read_in == backward:
            self._give_up()

    def label(self, what: str) -> AbstractContextManager[object]:
        """A range in the trace of torch.profiler."""
        owner = self.forward.owner(self.index)
        name = f"hf_memopt::{what} #{self.index} {self.num_bytes / 2**20:.2f} MiB {owner}"
        return torch.profiler.record_function(name.rstrip())

    def _count_read(self, backward: int, is_first: bool) -> None:
        if self.read_in != backward:
            self._num_left = self.num_views + self.num_dependents
        self._num_left -= is_first
        if self._num_left <= 0 or backward == 0:
            self._give_up()

    @abstractmethod
    def _bring(self, backward: int) -> Tensor:
        """The bytes on the device, wherever they are now."""

    @abstractmethod
    def _give_up(self) -> None:
        """Nobody asks for them any more, for now. The caller may still be at work on them."""


class KeptStorage(LiveStorage):
    """Stays on the device."""

    __slots__ = ("_tensor",)

    is_kept = True

    def __init__(self, tensor: Tensor, forward: "ForwardPass", index: int) -> None:
        super().__init__(tensor, forward, index)
        self._tensor = tensor.detach()
        forward.engine.residency.add(self.num_bytes)

    def _bring(self, backward: int) -> Tensor:
        return bytes_of(self._tensor)

    def _give_up(self) -> None:
        """Kept memory goes with the graph."""

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.forward.engine.forget(self.key)
            self.forward.engine.residency.now_bytes -= self.num_bytes


class OffloadedStorage(LiveStorage):
    """On its way to the host, on the host, or on its way back.

    Args:
        block: host memory of the storage's size. Returned to the arena when this object dies.
    """

    __slots__ = (
        "_block",
        "_counted_bytes",
        "_engine",
        "_incoming",
        "_may_be_noise",
        "_memory",
        "_outgoing",
        "_source",
        "is_leaving",
    )

    def __init__(self, tensor: Tensor, forward: "ForwardPass", index: int, block: Tensor) -> None:
        self._block = block
        self._engine = engine = forward.engine
        self._outgoing: Transfer | None = None
        self._incoming: Transfer | None = None
        self._source: Tensor | None = None
        self._memory: Tensor | None = None
        self._counted_bytes = 0
        # Whether it waits, among others, for its device memory to be given up.
        self.is_leaving = False
        # Only what autograd does not differentiate may be noise.
        self._may_be_noise = not tensor.requires_grad
        super().__init__(tensor, forward, index)
        source = bytes_of(tensor)
        self._outgoing = engine.copier.to_host(source, block)
        self._source = source
        self._counted_bytes = self.num_bytes
        engine.residency.add(self.num_bytes)

    @property
    def is_away(self) -> bool:
        """Whether the device has none of the bytes, and none are on their way."""
        return self._source is None and self._memory is None

    def let_go(self) -> None:
        """Give up the device memory; compute that reuses it is ordered after the copy."""
        if self._source is not None:
            self._release_source()
            self._engine.residency.now_bytes -= self._counted_bytes
            self._counted_bytes = 0

    def prefetch(self) -> None:
        """Start bringing the bytes back, unless they are here or on their way."""
        if self._source is not None or self._memory is not None:
            return
        engine, num_bytes = self._engine, self.num_bytes
        memory = engine.empty_device(num_bytes)
        self._incoming = engine.copier.to_device(self._block, memory)
        self._memory = memory
        self._counted_bytes = num_bytes
        engine.residency.add(num_bytes)

    def release(self) -> None:
        """Give up the device memory, wherever backward is."""
        if not self.is_away:
            self._give_up()

    def _bring(self, backward: int) -> Tensor:
        if self._source is not None and torch.is_grad_enabled():
            self.let_go()  # what a backward of the backward saves is not to be written by whoever has the original
        if self._source is None:
            if self._may_be_noise:
                refuse_rrelu()
            if self._memory is None:
                self.prefetch()  # before those that follow, if nobody has asked for it yet
        elif self.is_leaving:
            self._engine.stay(self)
        self.forward.about_to_use(self)
        return self._source if self._source is not None else self._arrive()

    def _arrive(self) -> Tensor:
        assert self._memory is not None
        assert self._incoming is not None
        self._incoming.wait()  # again for each use, which may be on another stream
        return self._memory

    def _give_up(self) -> None:
        # The view in use keeps the memory alive; it returns to the allocator in the order of the compute stream.
        if self._source is not None:
            self._release_source()
        elif self._memory is not None:
            self._arrive()
            self._memory = self._incoming = None
        self._engine.residency.remove_after_node(self._counted_bytes)
        self._counted_bytes = 0

    def _release_source(self) -> None:
        assert self._outgoing is not None
        if self.is_leaving:
            self._engine.stay(self)
        self._outgoing.wait()
        self._source = None

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        engine = self._engine
        try:
            # The host block is written or read until both copies are over.
            if self._source is not None:
                self._release_source()
            if self._incoming is not None:
                self._incoming.wait()
        finally:
            engine.forget(self.key)
            engine.residency.now_bytes -= self._counted_bytes
            engine.arena.release(self._block)


class TracedStorage(OffloadedStorage):
    """The same under torch.profiler, with a range in the trace for each copy and each wait."""

    __slots__ = ()

    def __init__(self, tensor: Tensor, forward: "ForwardPass", index: int, block: Tensor) -> None:
        self.forward, self.index, self.num_bytes = forward, index, tensor.untyped_storage().nbytes()
        with self.label("offload"):
            super().__init__(tensor, forward, index, block)

    def prefetch(self) -> None:
        if self.is_away:
            with self.label("prefetch"):
                super().prefetch()

    def _arrive(self) -> Tensor:
        with self.label("wait for prefetch"):
            return super()._arrive()

    def _release_source(self) -> None:
        with self.label("wait for offload"):
            super()._release_source()
