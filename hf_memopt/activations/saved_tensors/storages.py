"""The storages behind saved tensors, kept or copied to a lower memory and back.

They never see the pass that drives them.

`activations/README.md` draws the life of an offloaded one; `recompute/replay.py` has another kind.
"""

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor

from hf_memopt.activations.saved_tensors.device_state import DeviceState, Prefetcher
from hf_memopt.activations.saved_tensors.shown_elements import ShownElements
from hf_memopt.autograd_state import StoragePin, VersionGuard, bytes_of, graph_is_retained, num_tensors_on, refuse_rrelu
from hf_memopt.transfer import Transfer
from hf_memopt.transfer.lower_memory import Place
from hf_memopt.uncompiled import uncompiled


class ForeseenReads:
    """Reads of each storage by each backward through a pass, as far as a plan foresees them; empty without a plan."""

    def __init__(self, by_backward: Sequence[Sequence[int]] = ()) -> None:
        self._by_backward = by_backward
        self._backward = 0

    def end_backward(self) -> None:
        self._backward += 1

    def in_this_backward(self, index: int) -> int:
        return self._by_backward[self._backward][index]

    def comes_again(self, index: int) -> bool:
        """Return whether a later backward reads a storage that this one reads too."""
        later = self._by_backward[self._backward + 1 :]
        return bool(later) and index < len(later[0]) and any(reads[index] for reads in later)


_UNFORESEEN = ForeseenReads()


class LiveStorage(VersionGuard, ABC):
    """One device storage that a forward pass saved.

    A backward that frees its graph lets go of each saved tensor once it has used it, and with the last of them goes
    this object and all that it holds. Only where the graph is retained, or another graph has the storage too, is there
    anything to count: then bytes that a backward brought back go after their last use in that backward. `tensor` shares
    the version counter of all that are to be views of this object. With `owner`, the name of the module that saved it,
    `torch.profiler` shows copies, waits and computations.

    Attributes:
        is_pending: whether it is left alone because the model still has it, so that its memory counts as the model's. A
            storage of which a part was saved is, since other parts may follow.
        has_late_views: whether other nodes have saved parts of it meanwhile.
        num_dependents: storages that are still to be computed from this one.
        saved_by: the pass that autograd last saved it in; None while it is only there to compute others from.
        saved_in_node: the autograd node that saved it last, by the number that follows it.
        of_function: whether a custom `autograd.Function` saved it, whose backward may overwrite it.
        is_weight: whether it is a copy of a weight that its module keeps for good.
        num_writes: writes to its memory seen when it was saved, where they are watched.
        read_in: the number of the backward that read it last, 0 for none.
        pin: keeps the storage's address, which is `key`, from being given to another storage.
    """

    is_kept: ClassVar[bool] = False

    def __init__(
        self, tensor: Tensor, device: DeviceState, index: int, is_pending: bool = False, owner: str | None = None
    ) -> None:
        # Read by `__del__`, should anything fail.
        self.device, self.key = device, 0
        self._counted_bytes = self._plain_bytes = 0
        super().__init__(tensor)
        self.is_pending, self.has_late_views = is_pending, False
        storage = tensor.untyped_storage()
        self.index, self._owner = index, owner
        self.num_bytes = storage.nbytes()
        self.num_views = self.num_dependents = 0
        self.foreseen = _UNFORESEEN
        self.saved_by: object = None
        self.saved_in_node: int | None = None
        self.of_function = self.is_weight = False
        self.shown = ShownElements.of(tensor, self.num_bytes)
        self.num_writes: int | None = None
        # Of a retained graph's saved tensors, how many the backward `read_in` has not read yet.
        self.read_in = self._num_left = 0
        self.key = storage._cdata
        self.pin = StoragePin.of(storage)
        # Other objects of the same storage: of other versions, or saved by custom functions.
        entry = device.storages.get(self.key)
        earlier = entry() if entry is not None else None
        entry = device.storages[self.key] = weakref.ref(self)
        self._siblings: list[weakref.ref[LiveStorage]] | None = None
        if earlier is not None:
            if earlier._siblings is None:
                earlier._siblings = [weakref.ref(earlier)]
            earlier._siblings.append(entry)
            self._siblings = earlier._siblings

    def fetch(self, backward: int, is_first: bool) -> Tensor:
        """Return the bytes on the device, `(num_bytes,)` uint8, ready for the compute stream, unless modified since.

        `backward` is the number of that at work, 0 for none; `is_first`, whether the reader asks for the first time in
        it.
        """
        memory = self._bring(backward)
        if self.is_read_again():
            self._count_read(backward, is_first)
        self.read_in = backward
        return memory

    def is_read_again(self) -> bool:
        return graph_is_retained() or self.foreseen.comes_again(self.index)

    def end_backward(self, backward: int) -> None:
        if self.read_in == backward:
            self._give_up()

    def serves(self, tensor: Tensor, node: int, of_function: bool) -> bool:
        """Return whether a view that is being saved can be made from this object's bytes.

        One node saves all its tensors at once. Between two nodes code may have written elements that no view had shown,
        and the forward of a custom function those that it saves itself, both without any counter noticing.
        """
        if not self.covers(tensor):
            return False
        if self.is_pending:
            return True
        return self.saved_in_node == node or (not of_function and self.shown.include_all_of(tensor))

    def has_own_bytes_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor's bytes can be read from this object even after the model has written to its own."""
        is_copy = not self.is_kept and not self.is_pending and not self.of_function
        return is_copy and self.covers(tensor) and self.shown.include_all_of(tensor)

    def add_view(self, tensor: Tensor, node: int) -> None:
        self.has_late_views = self.has_late_views or (
            self.saved_in_node not in (None, node) and not self.shown.include_all_of(tensor)
        )
        self.saved_in_node = node
        self.shown.add(tensor)

    def is_left_alone(self) -> bool:
        """Return whether the model has no tensor of the storage any more, so that no other view of it can be saved."""
        siblings = [storage for entry in self._siblings or () if (storage := entry()) is not None] or [self]
        return num_tensors_on(self.key) <= sum(storage._num_own_tensors() for storage in siblings)

    def count_as_saved(self) -> None:
        """Count the memory that the storage holds in a plain run, once the model has let go of it."""
        if not self.is_pending and not self._plain_bytes:
            self._plain_bytes = self.num_bytes
            self.device.held.add_saved(self.num_bytes)

    @abstractmethod
    def ripen(self) -> None:
        """Start the pending copy: the bytes are complete, and the model has let go of their memory."""

    def _num_own_tensors(self) -> int:
        """Return how many tensors of the storage are held for the sake of this object."""
        return 0

    def _count_read(self, backward: int, is_first: bool) -> None:
        if self.read_in != backward:
            # Without a plan all readers are taken to be of the graph that is retained.
            is_foreseen = self.foreseen.comes_again(self.index)
            num_readers = self.num_views + self.num_dependents
            self._num_left = self.foreseen.in_this_backward(self.index) if is_foreseen else num_readers
        self._num_left -= is_first
        if self._num_left <= 0 or backward == 0:
            self._give_up()

    def _count(self) -> None:
        """Count the bytes that the storage holds on the device from now on."""
        self._counted_bytes = self.num_bytes
        self.device.held.add(self.num_bytes)

    def _uncount_after_node(self) -> None:
        self.device.held.remove_after_node(self._counted_bytes)
        self._counted_bytes = 0

    @uncompiled
    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._forget()

    def _forget(self) -> None:
        """Unregister a dying storage. Its key may have been registered anew."""
        entry = self.device.storages.get(self.key)
        # While `__del__` runs, a weak reference still gives the dying object.
        if entry is not None and entry() in (None, self):
            del self.device.storages[self.key]
        self.device.held.now_bytes -= self._counted_bytes
        self.device.held.plain_bytes -= self._plain_bytes

    def _range(self, work: str) -> AbstractContextManager[object]:
        if self._owner is None:
            return nullcontext()
        return traced_range(work, self.index, self.num_bytes, self._owner)

    @abstractmethod
    def _bring(self, backward: int) -> Tensor:
        """Return the bytes on the device, wherever they are now."""

    @abstractmethod
    def _give_up(self) -> None:
        """Release the device bytes. No reader is left in this backward; the caller may still hold a view."""


class KeptStorage(LiveStorage):
    is_kept = True

    def __init__(self, tensor: Tensor, device: DeviceState, index: int, is_pending: bool = False) -> None:
        super().__init__(tensor, device, index, is_pending)
        self._tensor = tensor.detach()
        if not is_pending:
            self.ripen()

    def ripen(self) -> None:
        self.is_pending = False
        self._count()

    def _num_own_tensors(self) -> int:
        return 1 + self.num_views

    def _bring(self, backward: int) -> Tensor:
        self.check()
        return bytes_of(self._tensor)

    def _give_up(self) -> None:
        """Do nothing: kept memory goes with the graph."""


class OwnCopy(KeptStorage):
    """A copy on the device, for computing others: the model may go on to write to its storage."""

    is_kept = False

    def __init__(self, tensor: Tensor, device: DeviceState, index: int) -> None:
        super().__init__(tensor, device, index)
        self._tensor = bytes_of(tensor).clone()

    def _bring(self, backward: int) -> Tensor:
        return self._tensor

    def _num_own_tensors(self) -> int:
        return 0


class OffloadedStorage(LiveStorage):
    """On its way to a memory below the device, there, or on its way back.

    Args:
        place: memory below the device, released when this object dies. None: the copy is pending.
        is_private: whether to copy from a copy, since the model may go on to write to its own memory.
    """

    def __init__(
        self,
        tensor: Tensor,
        device: DeviceState,
        index: int,
        place: Place | None,
        prefetcher: Prefetcher,
        is_private: bool = False,
        first_choice: int = 0,
        owner: str | None = None,
    ) -> None:
        # First all that `__del__` reads.
        self.device, self._place, self._prefetcher = device, place, prefetcher
        self._outgoing: Transfer | None = None
        self._incoming: Transfer | None = None
        self._source: Tensor | None = None
        self._memory: Tensor | None = None
        # The first byte that leaves; as many leave as the place has room for.
        self._first = 0
        self._first_choice = first_choice
        self._of_pass = device.num_passes
        self.is_leaving = False
        # Only tensors without `requires_grad` can be the noise of RReLU.
        self._may_be_noise = not tensor.requires_grad
        super().__init__(tensor, device, index, is_pending=place is None, owner=owner)
        self._is_private = is_private
        source = bytes_of(tensor).clone() if is_private else bytes_of(tensor)
        if place is None:
            self._source = source
        else:
            self._start(source, place)

    def ripen(self) -> None:
        """Start the copy of the elements that saved views have shown, or keep the memory where there is no place."""
        assert self._source is not None
        self.is_pending = False
        self._first, num_shown_bytes = self.shown.extent(self.num_bytes)
        storage = self._source.untyped_storage()
        self._place = self.device.acquire(num_shown_bytes, storage, self._first_choice)
        if self._place is not None:
            self._start(self._source, self._place)
        else:
            self._count()

    def _start(self, source: Tensor, place: Place) -> None:
        with self._range("offload"):
            self._outgoing = place.memory.write(self._part(source, place), place.block)
        self._source = source
        self._count()

    def _part(self, memory: Tensor, place: Place) -> Tensor:
        return memory if place.nbytes == self.num_bytes else memory[self._first : self._first + place.nbytes]

    def _num_own_tensors(self) -> int:
        return int(self._source is not None and not self._is_private)

    @property
    def num_copied_bytes(self) -> int:
        return 0 if self._place is None else self._place.nbytes

    @property
    def is_away(self) -> bool:
        """Return whether the device has none of the bytes, and none are on their way."""
        return self.has_left and self._memory is None

    @property
    def has_left(self) -> bool:
        """Return whether the device has given up the memory that was saved."""
        return self._source is None

    def let_go(self) -> None:
        """Give up the device memory; compute that reuses it is ordered after the copy."""
        if self._source is not None and self._place is not None:
            self._release_source()
            self.device.held.now_bytes -= self._counted_bytes
            self._counted_bytes = 0

    def prefetch(self) -> None:
        """Start bringing the bytes back, unless they are here or on their way."""
        if not self.is_away:
            return
        place = self._place
        assert place is not None
        memory = self.device.empty_device(self.num_bytes, place, self._first)
        with self._range("prefetch"), self.device.telling():
            self._incoming = place.memory.read(place.block, self._part(memory, place))
        self._memory = memory
        self._count()

    def release(self) -> None:
        if not self.is_away:
            self._give_up()

    def _bring(self, backward: int) -> Tensor:
        if not self._is_private:
            self.check()
        if self._place is None:
            assert self._source is not None
            return self._source
        if self._source is not None and torch.is_grad_enabled():
            self.let_go()  # a backward of the backward must not save memory that the model may write to
        if self._source is None:
            # The lower memory has the bytes as it was when the tensor was saved; noise is drawn only after that.
            if self._may_be_noise:
                refuse_rrelu()
            if self._memory is None:
                self.prefetch()  # before those that follow
        elif self.is_leaving:
            self.device.stay(self)
        self._prefetcher.begin_use(self.index)
        return self._source if self._source is not None else self._arrive()

    def _arrive(self) -> Tensor:
        assert self._memory is not None
        assert self._incoming is not None
        with self._range("wait for prefetch"), self.device.telling():
            self._incoming.wait()  # again for each use, which may be on another stream
        return self._memory

    def _give_up(self) -> None:
        # The view in use keeps the memory alive; it returns to the allocator in the order of the compute stream.
        if self._place is None:
            return
        if self._source is not None:
            self._release_source()
        elif self._memory is not None:
            self._arrive()  # the compute stream must be done with waiting before the memory can be reused
            self._memory = self._incoming = None
        self._uncount_after_node()

    def _release_source(self) -> None:
        assert self._outgoing is not None
        if self.is_leaving:
            self.device.stay(self)
        with self._range("wait for offload"), self.device.telling():
            self._outgoing.wait()
        self._source = None

    def _forget(self) -> None:
        told_in = self.device.told_in
        try:
            # Until both copies are over they use the place.
            if self._outgoing is not None and self._source is not None:
                self._release_source()
            if self._incoming is not None:
                self._incoming.wait()
        except Exception as error:
            self.device.told_in = told_in
            self.device.note_failure(error, self._of_pass)
        finally:
            super()._forget()
            if self._place is not None:
                self._place.release()


def traced_range(what: str, index: int, num_bytes: int, owner: str) -> AbstractContextManager[object]:
    name = f"hf_memopt::{what} #{index} {num_bytes / 2**20:.2f} MiB {owner}"
    return torch.profiler.record_function(name.rstrip())
