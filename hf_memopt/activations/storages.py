"""The storages behind saved tensors, and how each is had again in backward: kept, or copied to the host and back.

The third way, computing it again, is in `recompute.py`.
"""

import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memopt.activations.tensors import VersionGuard, bytes_of
from hf_memopt.transfer import Transfer

if TYPE_CHECKING:
    from hf_memopt.activations.schedule import ForwardPass


NOTHING = nullcontext()
is_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


class LiveStorage(ABC):
    """One device storage that a forward pass saved.

    Args:
        tensor: any view of the storage.
        guard: of a tensor that shares the storage's version counter.
        forward: the pass that saved it, which knows what will be needed next.
        index: its place in the pass.

    `num_needs` counts what will still ask for it: views that have not been unpacked, and storages computed from it.
    """

    def __init__(self, tensor: Tensor, guard: VersionGuard, forward: "ForwardPass", index: int) -> None:
        self.forward = forward
        self.index = index
        self.num_bytes = tensor.untyped_storage().nbytes()
        self.num_needs = 0
        # The pass that autograd last saved it in; None while it is only there to compute others from.
        self.saved_by: ForwardPass | None = None
        self.guard = guard
        # As long as this exists, no other storage is given the same key, however dead this one is.
        self._weak_source = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def holds(self, version: int) -> bool:
        """Whether the bytes are still those that were saved, and those of `version`."""
        return self.guard.version == version and not self.guard.was_modified()

    def use(self, counted: bool) -> Tensor:
        """`fetch` for a saved tensor that autograd unpacks."""
        self.forward.note_backward()
        recorder = self.forward.recorder
        if recorder is None or not counted:
            return self.fetch(counted)
        with recorder.using(self.index):
            return self.fetch(counted)

    def fetch(self, counted: bool) -> Tensor:
        """The bytes on the device, `(num_bytes,)` uint8, ready for the compute stream.

        Args:
            counted: whether this serves one of `num_needs`. With the last of them the device memory goes, once the
                caller lets go of the result.
        """
        self.guard.check()
        memory = self._bring()
        self.num_needs -= counted
        if self.num_needs == 0:
            self._give_up()
        return memory

    def label(self, what: str) -> AbstractContextManager[object]:
        """A range in the trace of a running torch.profiler."""
        owner = self.forward.owner(self.index)
        name = f"hf_memopt::{what} #{self.index} {self.num_bytes / 2**20:.2f} MiB {owner}"
        return torch.profiler.record_function(name.rstrip())

    @abstractmethod
    def _bring(self) -> Tensor:
        """The bytes on the device, wherever they are now."""

    @abstractmethod
    def _give_up(self) -> None:
        """Nobody asks for them any more."""


class KeptStorage(LiveStorage):
    """Stays on the device."""

    def __init__(self, tensor: Tensor, guard: VersionGuard, forward: "ForwardPass", index: int) -> None:
        super().__init__(tensor, guard, forward, index)
        self._tensor = tensor.detach()
        self._counted = True
        forward.engine.residency.add(self.num_bytes)

    def _bring(self) -> Tensor:
        return bytes_of(self._tensor)

    def _give_up(self) -> None:
        if self._counted:
            self._counted = False
            self.forward.engine.residency.remove_after_node(self.num_bytes)

    def __del__(self) -> None:
        if self._counted and not sys.is_finalizing():
            self.forward.engine.residency.remove(self.num_bytes)


class OffloadedStorage(LiveStorage):
    """On its way to the host, on the host, or on its way back.

    Args:
        block: host memory of the storage's size. Returned to the arena when this object dies.
    """

    def __init__(self, tensor: Tensor, guard: VersionGuard, forward: "ForwardPass", index: int, block: Tensor) -> None:
        self._block = block
        self._outgoing: Transfer | None = None
        self._incoming: Transfer | None = None
        self._engine = forward.engine
        self._source: Tensor | None = None
        self._memory: Tensor | None = None
        super().__init__(tensor, guard, forward, index)
        source = bytes_of(tensor)
        with self.label("offload") if is_profiling() else NOTHING:
            self._outgoing = self._engine.copier.to_host(source, block)
        self._source = source
        self._counted_bytes = self.num_bytes
        self._engine.residency.add(self.num_bytes)

    def let_go(self) -> None:
        """Give up the device memory; compute that reuses it is ordered after the copy."""
        if self._source is not None:
            assert self._outgoing is not None
            with self.label("wait for offload") if is_profiling() else NOTHING:
                self._outgoing.wait()
            self._source = None
            self._discount()

    def prefetch(self) -> None:
        """Start bringing the bytes back, unless they are here or on their way."""
        if self._source is None and self._memory is None:
            with self.label("prefetch") if is_profiling() else NOTHING:
                memory = self._engine.copier.empty_device(self.num_bytes)
                self._incoming = self._engine.copier.to_device(self._block, memory)
            self._memory = memory
            self._counted_bytes = self.num_bytes
            self._engine.residency.add(self.num_bytes)

    def _bring(self) -> Tensor:
        self.prefetch()  # before those that follow, if nobody has asked for it yet
        self.forward.about_to_use(self)
        return self._source if self._source is not None else self._arrive()

    def _arrive(self) -> Tensor:
        assert self._memory is not None
        if self._incoming is not None:
            with self.label("wait for prefetch") if is_profiling() else NOTHING:
                self._incoming.wait()
            self._incoming = None
        return self._memory

    def _give_up(self) -> None:
        # The view in use keeps the memory alive; it returns to the allocator in the order of the compute stream.
        self._memory = None
        self._engine.residency.remove_after_node(self._counted_bytes)
        self._counted_bytes = 0

    def _discount(self) -> None:
        self._engine.residency.remove(self._counted_bytes)
        self._counted_bytes = 0

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        # The host block is written or read until both copies are over.
        for transfer in (self._outgoing, self._incoming):
            if transfer is not None:
                transfer.wait()
        if self._outgoing is not None:
            self._discount()
        self._engine.arena.release(self._block)
