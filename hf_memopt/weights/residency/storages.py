"""Storages of weights: each has memory while something uses it, and none in between.

The storage stays the same object, so that every alias of it sees the bytes come back: views that autograd has saved,
those in the frames of checkpointed regions, and those in the contexts of custom functions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memopt.transfer import Copier, Transfer
from hf_memopt.transfer.storage_memory import ResizedMemory
from hf_memopt.weights.homes.home import WeightsHome
from hf_memopt.weights.homes.packed_weights import WeightSlice, bind, span_bytes, views
from hf_memopt.weights.residency.away import Classes, set_away, set_plain, set_present

# The reason for which a storage stays until nobody else has tensors or arrays on it.
HELD = "held since a visit"
# That of one whose bytes the home does not have.
WRITTEN = "written"


class Storage:
    """Bytes that come and go, as a `ResidentSet` sees them; of this very class, those of a forecast, only counted.

    Attributes:
        num_bytes: of it.
        users: those that rely on the bytes at the moment.
        stays: whether it keeps its memory without users.
        has_memory: whether it may have memory, filled or not: until `drop` has ended.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.stays, self.has_memory = num_bytes, False, False
        self.users: set[object] = set()

    def fetch(self) -> None:
        """Give it memory and start the copy of its bytes, unless that has been done."""
        self.has_memory = True

    def arrive(self) -> None:
        """Make the compute stream wait for the copy."""

    def rest(self) -> None:
        """Note that nobody uses it, though its bytes may stay."""

    def drop(self) -> None:
        """Give the memory up. Work submitted so far may still read it."""
        self.has_memory = False

    def is_held_by_others(self) -> bool:
        """Return whether a graph, or anybody else, has tensors on it, or one of its parameters."""
        return False

    def reason_to_stay(self) -> str | None:
        """Return the reason for which its memory cannot be given up now, or None if it can."""
        return None


class StreamedStorage(Storage):
    """The storage of one slice of weights, to which their parameters are bound.

    Attributes:
        tensors: the parameters, or the tensors inside quantised ones.
        present: by tensor, its view of the storage.
        key: of the storage, torch's own.
        num_writes: how often its bytes have changed, as far as that is sure.
        bytes_to_home: written there so far.

    Args:
        parameters: those of which it holds bytes.
        is_written_home: whether what is written to it goes home, before its memory is given up.
    """

    def __init__(
        self,
        piece: WeightSlice,
        parameters: Sequence[Tensor],
        home: WeightsHome,
        device: torch.device,
        copier: Copier,
        message: str,
        is_written_home: bool = False,
    ) -> None:
        super().__init__(piece.num_bytes)
        self.message = message
        self.tensors = [each.tensor for each in piece.offsets]
        self._classes = [Classes.of(each) for each in parameters]
        self._start, self._home, self._copier = piece.start, home, copier
        self._memory = home.memory(piece, device, message)
        self.key: int = self._memory.block.untyped_storage()._cdata
        self._offsets = piece.offsets
        self.present = views(
            [each._replace(start=each.start - piece.start) for each in piece.offsets], self._memory.block
        )
        self._memory.take()
        self._versions: list[int] = []
        self._num_own_holders = 0
        self._to_fill: Tensor | None = None
        # The copy under way, None before and after.
        self._transfer: Transfer | None = None
        self._is_starting = False
        self._is_filled = False
        self._is_written_home = is_written_home
        self.num_writes = self.bytes_to_home = 0
        self._is_newer = False  # than the bytes at home
        self._going: Transfer | None = None  # the write home that is under way
        # By an array, whose writes torch does not count.
        self._has_changed = False

    def fetch(self) -> None:
        self._settle()
        self.has_memory = True
        if self._to_fill is None:
            self._to_fill = self._memory.give()
        if not self._is_filled and self._transfer is None:
            self._is_starting = True
            self._transfer = self._home.to_device(self._start, self._to_fill)
            self._is_starting = False

    def arrive(self) -> None:
        self.settle()  # its user may write it
        if not self._is_filled:
            assert self._transfer is not None
            try:
                self._transfer.wait()
            except Exception:
                self._transfer = None  # it is over
                raise
            self._memory.show()
            self._is_filled = True
            self._transfer = None

    def show(self, are_watched: bool = True) -> None:
        """Allow every thread to read the parameters, which have arrived."""
        (set_present if are_watched else set_plain)(self._classes)

    def rest(self) -> None:
        set_away(self._classes)
        self._send()

    def drop(self) -> None:
        set_away(self._classes)
        self.flush()
        self._is_filled = False
        self._settle()
        error: Exception | None = None
        if self._transfer is not None:
            try:
                self._transfer.wait()  # the memory must not go to others before; an interrupt leaves it here
            except Exception as failure:
                error = failure
            self._transfer = None
        filled, self._to_fill = self._to_fill, None
        if filled is not None:
            self._copier.release(filled)
        self._memory.take()
        self.has_memory = False
        if error is not None:
            raise error

    def note_written(self, is_sure: bool = True) -> bool:
        """Take note that its bytes have, or may have, changed; returns whether they go home before its memory goes."""
        if self._is_written_home:
            self.num_writes += is_sure
            self._is_newer, self._has_changed = True, False
            with torch._C.DisableTorchFunctionSubclass():
                self._versions = [tensor._version for tensor in self.tensors]
        return self._is_written_home

    def flush(self) -> None:
        """Write the bytes home if they are newer."""
        self._send()
        self.settle()

    def settle(self) -> None:
        """Wait until a write home that is under way is over; the bytes stay where it has failed."""
        if self._going is not None:
            try:
                self._going.wait()
            except Exception:
                self._going, self._is_newer = None, True
                raise
            self._going = None

    def _send(self) -> None:
        """Start writing the bytes home where they have changed."""
        if self._is_newer and self._is_filled and self._going is None:
            assert self._to_fill is not None
            self._settle()
            self._is_starting = True
            self._going = self._home.to_home(self._start, self._to_fill)
            self._is_starting = self._is_newer = False
            self.bytes_to_home += self.num_bytes

    def _settle(self) -> None:
        """Wait for a copy that an interrupt has cut off as it was started, either way."""
        if self._is_starting:
            self._home.settle()
            self._is_starting = False

    @property
    def is_simulated(self) -> bool:
        return type(self._memory.block) is not Tensor

    def bind(self) -> None:
        # Simulated tensors give a storage memory when they are bound to it.
        is_absent = not self.has_memory and self.is_simulated
        if is_absent:
            self._memory.give()
        set_plain(self._classes)  # whose `.data` binds
        bind(self._offsets, self.present)
        if is_absent:
            self._memory.take()
        self._versions = [tensor._version for tensor in self.tensors]
        if not self._num_own_holders:
            self._num_own_holders = self.num_holders()
        (set_present if self._is_filled and self.users else set_away)(self._classes)

    def unbind(self, tensors: Sequence[Tensor]) -> None:
        """Bind the parameters to other memory, which does not come and go."""
        set_plain(self._classes)
        bind(self._offsets, tensors)
        set_present(self._classes)

    def follow(self, place: int, tensor: Tensor) -> None:
        """Bind another tensor in the place of one: a quantised weight has new ones inside after each `to(device)`."""
        self.tensors[place] = tensor
        self._offsets = tuple(
            each._replace(tensor=found) for each, found in zip(self._offsets, self.tensors, strict=True)
        )
        self.bind()

    def reason_to_stay(self) -> str | None:
        if self._memory.is_exported and self.is_held_by_others():
            return HELD
        return WRITTEN if self._has_changed_by_arrays() and not self.note_written() else None

    def _has_changed_by_arrays(self) -> bool:
        """Return whether the memory has other bytes than the home, where an array has had it, which nothing guards."""
        if self._memory.is_exported and self._is_filled and not self._has_changed:
            fresh = self._copier.empty_device(self.num_bytes)
            self._home.to_device(self._start, fresh).wait()
            end = max(each.start - self._start + span_bytes(each.tensor) for each in self._offsets)
            self._has_changed = not torch.equal(fresh[:end], self._memory.block[:end])
            self._copier.release(fresh)
        return self._has_changed

    def is_held_by_others(self) -> bool:
        num_holders = self.num_holders()
        self._num_own_holders = min(self._num_own_holders, num_holders)  # a graph older than this object may go
        return num_holders > self._num_own_holders

    def num_holders(self) -> int:
        """Return how many references torch counts to the storage and its parameters."""
        tensors: list[Any] = self.tensors
        with torch._C.DisableTorchFunctionSubclass():
            found: int = torch._C._storage_Use_Count(self.key) + sum(tensor._use_count() for tensor in tensors)
            return found

    def is_written(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self._has_changed or [tensor._version for tensor in self.tensors] != self._versions

    def is_unchanged(self) -> bool:
        """Return whether the parameters are bound as this object has left them, and no write would be lost."""
        with torch._C.DisableTorchFunctionSubclass():
            return (self._is_written_home or not self.is_written()) and all(
                tensor.dtype == view.dtype and tensor.untyped_storage()._cdata == self.key
                for tensor, view in zip(self.tensors, self.present, strict=True)
            )


class CastWeight:
    """A weight in another dtype, as autocast makes it, from the bytes of its storage.

    Autograd would keep autocast's own copy from forward to backward, as it is not the weight. This one comes and goes.

    Attributes:
        tensor: the weight in the other dtype.
        users: those that rely on it at the moment.
    """

    @torch.inference_mode(False)  # autograd saves it in later passes
    def __init__(
        self, storage: StreamedStorage, dtype: torch.dtype, copier: Copier, contexts: "AutocastContexts"
    ) -> None:
        original = storage.present[0]
        self.num_bytes = original.numel() * dtype.itemsize
        self.users: set[object] = set()
        self._storage, self._original, self._copier, self._contexts = storage, original, copier, contexts
        self._num_writes = storage.num_writes
        self._in_graph: _InGraph | None = None
        self._memory = ResizedMemory(self.num_bytes, original.device, storage.message)
        self.tensor = self._memory.block.view(dtype).as_strided(original.size(), original.stride())
        self._memory.take()
        self._to_fill: Tensor | None = None

    def make(self) -> None:
        """Give it memory and cast the weight, which must be there."""
        self._to_fill = self._memory.give()
        filled = self._to_fill.data.view(self.tensor.dtype)  # not counted as a change of what autograd has saved
        with torch.no_grad():
            filled.as_strided(self.tensor.size(), self.tensor.stride()).copy_(self._original)
        if self._num_writes != self._storage.num_writes:  # a graph that has saved it is out of date
            self._num_writes = self._storage.num_writes
            torch.autograd.graph.increment_version(self.tensor)
        self._memory.show()

    def in_graph(self, weight: Tensor) -> Tensor:
        """Return the tensor with its edge to a weight that trains.

        Autocast casts a float32 leaf once for all uses in its context, whose gradients add up before the cast back.
        """
        context = self._contexts.present() if weight.dtype is torch.float32 and weight.is_leaf else None
        if context is None:
            found: Tensor = _cast(weight, self.tensor)
            return found
        if self._in_graph is None or self._in_graph.context is not context:
            self._in_graph = _InGraph(context, _cast(weight, self.tensor), self._storage.num_writes)
        if self._in_graph.num_writes != self._storage.num_writes:
            name = self._storage.message.partition(" is away")[0]
            raise RuntimeError(
                f"{name} was written inside of autocast, whose cache keeps a cast of the old values; leave autocast "
                "before the update"
            )
        return self._in_graph.tensor

    def is_in_graph(self, context: object | None) -> bool:
        """Return whether a graph has a result of this autocast context."""
        return self._in_graph is not None and self._in_graph.context is context

    def forget_graph(self, context: object | None) -> None:
        """Forget the result that a graph has, unless it is of the present autocast context."""
        if self._in_graph is not None and self._in_graph.context is not context:
            self._in_graph = None

    def drop(self) -> None:
        filled, self._to_fill = self._to_fill, None
        if filled is not None:
            self._copier.release(filled)
        self._memory.take()


class _InGraph(NamedTuple):
    """The cast of a weight that trains, as a graph has it, of an autocast context and after so many writes."""

    context: object
    tensor: Tensor
    num_writes: int


class _Cast(torch.autograd.Function):
    """A cast whose result, in memory that comes and goes, is there already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return cast.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


_cast: Any = _Cast.apply


class AutocastContexts:
    """Distinguishes autocast contexts on a device, by the node of a cast that autocast has in its cache."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaf: Tensor | None = None

    def present(self) -> object | None:
        """Return an object of the outermost context, the same one each time, or None where autocast caches nothing."""
        if not (torch.is_autocast_enabled(self._device.type) and torch.is_autocast_cache_enabled()):
            return None
        with torch.inference_mode(False), torch.enable_grad():
            if self._leaf is None:
                self._leaf = torch.ones(1, 1, device=self._device, requires_grad=True)
            product: Any = torch.mm(self._leaf, self._leaf).grad_fn
        node: object = next(node for node, _ in product.next_functions if node is not None)
        return node
