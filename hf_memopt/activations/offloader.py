"""Saved activations go to host memory after the forward pass has used them and come back in time for backward."""

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_memopt.activations.payload import Kept, Offloaded, OffloadedStorage
from hf_memopt.activations.schedule import ForwardPass, Prefetcher
from hf_memopt.transfer import Copier, copier_for
from hf_memopt.transfer.host_arena import HostArena

logger = logging.getLogger(__name__)

# How many bytes may wait for their copy to the host, as a multiple of the largest storage seen, before compute has to
# wait too. Two let one copy run while the next tensor is computed.
_STORAGES_IN_FLIGHT = 2


@dataclass(frozen=True)
class OffloadStats:
    """Counters since the offloader was made.

    Attributes:
        bytes_kept: saved tensors left on the device, by view, without the model's weights.
        bytes_moved: copied to the host.
        bytes_deduplicated: saved views whose storage had been copied already.
        host_bytes_live: host memory that graphs hold now; 0 once none is alive.
        host_bytes_held: host memory in use or kept for the next step.
        num_host_allocations: grows in the first steps only.
        stall_ms: time for which compute waited for copies.
    """

    bytes_kept: int
    bytes_moved: int
    bytes_deduplicated: int
    host_bytes_live: int
    host_bytes_held: int
    num_host_allocations: int
    stall_ms: float


class ActivationOffloader:
    """Moves what autograd saves for backward to host memory, exactly, and brings it back ahead of its use.

    Gradients are bitwise those of the plain run: each storage is copied once, byte for byte, however many views of it
    are saved, and views come back with their strides, offsets and lazy conjugation. Weights, buffers and their views
    never move. Tensors of unknown subclasses stay on the device.

    Args:
        enabled: False makes every method a pass-through.
        offload_threshold_mb: storages smaller than this many MiB stay on the device.
        prefetch_ahead: how many storages backward brings back ahead of their use, in the order that it used last time.
            0 fetches each one when it is needed.
        pin_memory: use page-locked host memory. False copies more slowly and blocks the host.
        host_budget_gib: host memory to use at most; what finds no room stays on the device. None, no limit.
        copier: how bytes move. None: side streams on an accelerator, and nothing to do on the CPU. `SyncCopier()` makes
            a CPU run every step of an offloaded run.

    Limits: only the innermost pair of saved-tensor hooks runs, so this must not be stacked on another offloader, and
    regions under activation checkpointing show only their inputs. Tensors that a custom autograd function stores on
    its context by itself are not seen.
    """

    def __init__(
        self,
        enabled: bool = True,
        offload_threshold_mb: float = 10.0,
        prefetch_ahead: int = 2,
        pin_memory: bool = True,
        host_budget_gib: float | None = None,
        copier: Copier | None = None,
    ) -> None:
        _not_negative("offload_threshold_mb", offload_threshold_mb)
        _not_negative("prefetch_ahead", prefetch_ahead)
        _not_negative("host_budget_gib", host_budget_gib or 0)
        self._options = (enabled, offload_threshold_mb, prefetch_ahead, pin_memory, host_budget_gib, copier)
        self.enabled = enabled
        self._threshold_bytes = max(1, round(offload_threshold_mb * 2**20))
        self._pin_memory = pin_memory
        self._budget_bytes = None if host_budget_gib is None else round(host_budget_gib * 2**30)
        self._given_copier = copier
        self._engines: dict[torch.device, _Engine | None] = {}
        self._prefetcher = Prefetcher(prefetch_ahead)
        self._told: set[str] = set()
        self._bytes_kept = 0
        self._bytes_deduplicated = 0

    @contextmanager
    def offload_context(self, model: nn.Module | None = None) -> Iterator["ActivationOffloader"]:
        """Offload what is saved for backward inside. Backward may run inside the context or after it.

        Args:
            model: its parameters and buffers are never moved. Without it they are recognised where autograd shows them
                as parameters, which casts and sharded weights do not.
        """
        if not self.enabled:
            yield self
            return
        fixed = _storages_of(model)
        forward = ForwardPass(self._prefetcher)
        with saved_tensors_hooks(lambda tensor: self._pack(tensor, fixed, forward), _unpack):
            yield self

    def wrap(self, model: nn.Module) -> "WrappedModule":
        """Run every forward of `model` in an `offload_context`; returns a handle whose `remove()` undoes it.

        Works through forward hooks, so `model` keeps its class, its `forward` and its state, and copies and pickles of
        it are wrapped as well, each with an offloader of its own.
        """
        return WrappedModule(self, model)

    def offload_tensor(self, tensor: Tensor) -> Kept | Offloaded:
        """Start copying one tensor to the host. Drop the tensor to free its memory; `fetch_tensor` brings it back.

        Below the threshold, or where no host memory is left, the tensor itself is kept.
        """
        payload = self._pack(tensor, frozenset(), ForwardPass(self._prefetcher))
        if isinstance(payload, Offloaded):
            payload.let_go()
        return payload

    def fetch_tensor(self, payload: Kept | Offloaded) -> Tensor:
        """The tensor that `offload_tensor` took, on its device, without gradient history."""
        return payload.restore()

    @property
    def stats(self) -> OffloadStats:
        """What has been moved so far."""
        engines = [engine for engine in self._engines.values() if engine is not None]
        return OffloadStats(
            bytes_kept=self._bytes_kept,
            bytes_moved=sum(engine.copier.bytes_to_host for engine in engines),
            bytes_deduplicated=self._bytes_deduplicated,
            host_bytes_live=sum(engine.arena.bytes_live for engine in engines),
            host_bytes_held=sum(engine.arena.bytes_held for engine in engines),
            num_host_allocations=sum(engine.arena.num_allocations for engine in engines),
            stall_ms=sum(engine.copier.stall_ms() for engine in engines),
        )

    def __reduce__(self) -> Any:
        # Copies and pickles carry the options: memory, streams and what was learned belong to one process's graphs.
        return ActivationOffloader, self._options

    def _pack(self, tensor: Tensor, fixed: frozenset[int], forward: ForwardPass) -> Kept | Offloaded:
        if type(tensor) is not Tensor:
            return self._keep_subclass(tensor)
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        if storage is None or storage.nbytes() < self._threshold_bytes:
            return self._keep(tensor)
        if storage._cdata in fixed or _is_weight(tensor):
            return Kept(tensor)
        engine = self._engine(tensor.device)
        found = None if engine is None else engine.storage_of(tensor, storage, forward)
        if found is None:
            return self._keep(tensor)
        if found.num_waiting_views:
            self._bytes_deduplicated += tensor.nbytes
        return Offloaded(found, tensor)

    def _keep(self, tensor: Tensor) -> Kept:
        self._bytes_kept += tensor.nbytes
        return Kept(tensor)

    def _keep_subclass(self, tensor: Tensor) -> Kept:
        name = type(tensor).__name__
        if not isinstance(tensor, nn.Parameter) and name not in self._told:
            self._told.add(name)
            logger.info("activation offloading: saved tensors of type %s stay on the device", name)
        return Kept(tensor)

    def _engine(self, device: torch.device) -> "_Engine | None":
        if device not in self._engines:
            copier = self._given_copier
            if copier is None and device.type != "cpu":
                copier = copier_for(device, pin_memory=self._pin_memory)
            self._engines[device] = None if copier is None else _Engine(copier, self._budget_bytes)
        return self._engines[device]


class _Engine:
    """Copies from one device: its host memory, what is stored there, and what is on its way."""

    def __init__(self, copier: Copier, budget_bytes: int | None) -> None:
        self.copier = copier
        self.arena = HostArena(copier, budget_bytes)
        self._storages: weakref.WeakValueDictionary[int, OffloadedStorage] = weakref.WeakValueDictionary()
        # Weak: a graph that is dropped takes its storages along, copies under way included.
        self._leaving: deque[weakref.ref[OffloadedStorage]] = deque()
        self._largest_bytes = 0

    def storage_of(
        self, tensor: Tensor, storage: torch.UntypedStorage, forward: ForwardPass
    ) -> OffloadedStorage | None:
        """The offloaded storage of a tensor, offloaded now if it was not; None where the host has no room."""
        found = self._storages.get(storage._cdata)
        if found is not None and found.holds(tensor):
            return found
        block = self.arena.acquire(storage.nbytes())
        if block is None:
            return None
        found = OffloadedStorage(tensor, block, self.arena, self.copier, forward)
        self._storages[storage._cdata] = found
        self._leaving.append(weakref.ref(found))
        self._largest_bytes = max(self._largest_bytes, found.num_bytes)
        self._let_go()
        return found

    def _let_go(self) -> None:
        """Free the device memory of copies that are over, and of the oldest ones where too many are under way."""
        leaving = [storage for storage in (ref() for ref in self._leaving) if storage is not None]
        surplus = sum(storage.num_bytes for storage in leaving) - _STORAGES_IN_FLIGHT * self._largest_bytes
        for storage in leaving:
            if surplus <= 0 and not storage.has_left():
                break
            storage.let_go()
            surplus -= storage.num_bytes
            self._leaving.popleft()


class WrappedModule:
    """A module whose forwards run in an `offload_context`."""

    def __init__(self, offloader: ActivationOffloader, model: nn.Module) -> None:
        self.offloader = offloader
        self._contexts: list[Any] = []
        self._handles = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            # Also after an exception, or the hooks would go on packing whatever runs next.
            model.register_forward_hook(self._exit, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, model: nn.Module, inputs: Any) -> None:
        context = self.offloader.offload_context(model)
        context.__enter__()
        self._contexts.append(context)

    def _exit(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self._contexts.pop().__exit__(None, None, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_contexts": []}


def wrap_forward_with_offload(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function that runs `forward` in an `offload_context` of its own offloader.

    Args:
        forward: a function or a module's bound `forward`; a bound method's module tells which weights must not move.
        options: of `ActivationOffloader`.
    """
    offloader = ActivationOffloader(**options)
    owner = getattr(forward, "__self__", None)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with offloader.offload_context(owner if isinstance(owner, nn.Module) else None):
            return forward(*args, **kwargs)

    return wrapped


def _unpack(payload: Kept | Offloaded) -> Tensor:
    return payload.restore()


def _storages_of(model: nn.Module | None) -> frozenset[int]:
    if model is None:
        return frozenset()
    tensors = [*model.parameters(), *model.buffers()]
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors if type(tensor.data) is Tensor)


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a view or an autocast copy of a parameter: its history ends there without arithmetic."""
    if isinstance(tensor._base, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1 and node.name() in _RESHAPING:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


_RESHAPING = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ToCopyBackward0")


def _not_negative(field: str, value: float) -> None:
    if value < 0:
        raise ValueError(f"{field}={value} must not be negative; use 0 for none")
