"""The pair of hooks that autograd calls for each tensor that it saves and each one that it asks for again.

The graph owns the payloads, and these the storages: a graph dropped or lost to an exception frees its memory itself.
"""

import logging
import sys
import threading
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from hf_memopt.activations.offloaded_pass import OffloadedPass, View
from hf_memopt.activations.saved_tensors.storages import LiveStorage
from hf_memopt.activations.stats import OffloadCounters
from hf_memopt.autograd_state import (
    COMES_AND_GOES,
    NO_BACKWARD,
    PLAIN_TYPES,
    ViewMeta,
    called_from_checkpoint,
    called_from_function,
    called_from_rrelu,
    current_backward,
    in_backward,
    in_recomputation,
    is_plain,
    is_regathered,
    is_weight,
    modified_in_place,
    unwrapped,
)
from hf_memopt.uncompiled import uncompiled

logger = logging.getLogger(__name__)

# A tensor that stays on the device uncounted: a detached alias and its version. A pair, since there may be thousands.
# Returning the tensor itself would tie the graph into a reference cycle.
Kept = tuple[Tensor, int]
_STRIDED = torch.strided


class KeptView(View):
    """A saved tensor as a view of a storage that is counted and stays on the device."""

    __slots__ = ("_kept",)

    def __init__(self, storage: LiveStorage, this_pass: OffloadedPass, tensor: Tensor) -> None:
        super().__init__(storage, this_pass)
        self._kept = tensor.detach(), tensor._version

    def restore(self) -> Tensor:
        self._pass.note_use(self._storage, self)
        return _unmodified(self._kept)


class MovedView(View):
    """A saved tensor as a view of a storage that comes back to the device or is computed again."""

    __slots__ = ("_meta",)

    def __init__(self, storage: LiveStorage, this_pass: OffloadedPass, tensor: Tensor) -> None:
        super().__init__(storage, this_pass)
        self._meta = ViewMeta(tensor)

    def restore(self) -> Tensor:
        memory = self._pass.use(self._storage, self)
        return self._storage.counted_together(self._meta.of(memory))


Payload = Kept | KeptView | MovedView


class SavedTensorHooks:
    """The hooks of one `offload_context`, on as long as it is entered, or until a pass that keeps everything has begun.

    Args:
        fixed: keys of storages that never move: the model's weights and buffers.
        begin_pass: the forward pass on a device, None where nothing can be offloaded.
        inputs_only: leave everything alone but the inputs of checkpointed regions.
        leave_node: called while a backward node unpacks its saved tensors, where operations are noted.
    """

    def __init__(
        self,
        threshold_bytes: int,
        fixed: frozenset[int],
        begin_pass: Callable[[torch.device], OffloadedPass | None],
        counters: OffloadCounters,
        lock: threading.RLock,
        *,
        inputs_only: bool = False,
        leave_node: Callable[[], None] | None = None,
        is_skipped: Callable[[FrameType | None], bool] | None = None,
    ) -> None:
        self._lock = lock
        self._threshold_bytes, self._fixed = threshold_bytes, fixed
        self._begin_pass, self._counters = begin_pass, counters
        self._inputs_only, self._leave_node = inputs_only, leave_node
        self._is_skipped = is_skipped
        self._passes: dict[torch.device, OffloadedPass | None] = {}
        self._hooks: saved_tensors_hooks | None = None
        self._backward = NO_BACKWARD

    def __enter__(self) -> None:
        # Losses that cache gradients run the model again inside of a backward, for another one. A recomputation does so
        # for the one that it is in, or for one that begins at once.
        self._backward = NO_BACKWARD if in_recomputation() else current_backward()
        self._hooks = saved_tensors_hooks(self.pack, self.unpack)
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._take_off()

    @property
    def has_begun(self) -> bool:
        return bool(self._passes)

    @uncompiled
    def pack(self, tensor: Tensor) -> Payload:
        """Return the payload to save instead of `tensor`. Cheap questions first: most are small or weights."""
        if type(tensor) not in PLAIN_TYPES:
            return self._keep_subclass(tensor)
        if tensor.layout is not _STRIDED or tensor.is_nested:  # memory of another kind, which is not counted
            return tensor.detach(), tensor._version
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if num_bytes < self._threshold_bytes:  # most saved tensors: `_keep`, without the call
            self._counters.bytes_kept += tensor.nbytes
            if num_bytes > self._counters.largest_small_bytes:
                self._counters.largest_small_bytes = num_bytes
            return tensor.detach(), tensor._version
        key = storage._cdata
        if key in self._fixed or is_weight(tensor):
            self._counters.bytes_weights += tensor.nbytes
            return tensor.detach(), tensor._version
        if current_backward() != self._backward:  # saved by a backward itself (recomputation, double backward)
            return self._keep(tensor)  # since it is used at once
        caller = sys._getframe().f_back  # none in a thread that is not Python's
        if self._inputs_only and not called_from_checkpoint(caller):
            return self._keep(tensor)
        if (self._inputs_only or not tensor.requires_grad) and called_from_rrelu(caller):
            return self._keep(tensor)
        with self._lock:
            return self._save(tensor, key, num_bytes, caller)

    def _save(self, tensor: Tensor, key: int, num_bytes: int, caller: FrameType | None) -> Payload:
        if tensor.device not in self._passes:
            self._passes[tensor.device] = self._begin_pass(tensor.device)
        this_pass = self._passes[tensor.device]
        if this_pass is None or tensor._is_zerotensor():  # a zero of forward-mode AD, which has no memory
            return self._keep(tensor)
        of_function = called_from_function(caller)
        is_skipped = self._is_skipped is not None and self._is_skipped(caller)
        if not this_pass.is_observed:
            live = this_pass.save(tensor, key, num_bytes, of_function, is_skipped)
        else:  # our own operations are no part of the model's: neither timed nor noted
            with this_pass.working(), this_pass.device.hide_operations():
                live = this_pass.save(tensor, key, num_bytes, of_function, is_skipped)
        if this_pass.keeps_all:
            self._take_off()  # the first storage tells when backward ends, and that is all there is to learn
        return KeptView(live, this_pass, tensor) if live.is_kept else MovedView(live, this_pass, tensor)

    @uncompiled
    def unpack(self, payload: Payload) -> Tensor:
        """Return the saved tensor, ready for the compute stream; a RuntimeError if it was modified in place since."""
        if self._leave_node is not None and in_backward():
            self._leave_node()
        if not isinstance(payload, tuple):
            with self._lock:
                return payload.restore()
        tensor, version = payload  # `_unmodified`, without the call
        if tensor._version != version:
            raise modified_in_place(tensor, tensor.shape, version)
        return tensor

    def _take_off(self) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()

    def _keep(self, tensor: Tensor) -> Kept:
        self._counters.bytes_kept += tensor.nbytes
        return tensor.detach(), tensor._version

    def _keep_subclass(self, tensor: Tensor) -> Kept:
        if isinstance(tensor, nn.Parameter) and is_regathered(tensor):
            return tensor, tensor._version  # no cycle: a parameter does not keep the graph
        name = type(tensor).__name__
        if not isinstance(tensor, nn.Parameter) and name not in self._counters.subclasses:
            self._counters.subclasses.add(name)
            logger.info("activation offloading: saved tensors of type %s stay on the device", name)
        return tensor.detach(), tensor._version


def storages_of(model: nn.Module | None) -> frozenset[int]:
    """Return the keys of the storages of a model's weights and buffers, also those inside packed and quantised ones.

    Those without memory are left out: ZeRO-3 replaces them in forward, and activations may be given their keys. So are
    those that are brought before each use (see `is_regathered`), which a look at their data would bring.
    """
    if model is None:
        return frozenset()
    with _disable_current_modes():  # whose owners would take this for reads of the weights
        here = [each for each in (*model.parameters(), *model.buffers()) if not hasattr(each, COMES_AND_GOES)]
        tensors = [inner for tensor in here for inner in unwrapped(tensor.data)]
    storages = [tensor.untyped_storage() for tensor in tensors if is_plain(tensor)]
    return frozenset(storage._cdata for storage in storages if storage.nbytes())


def _unmodified(kept: Kept) -> Tensor:
    """Return a kept tensor, unless it was modified: saved-tensor hooks switch off autograd's own check."""
    tensor, version = kept
    if tensor._version != version:
        raise modified_in_place(tensor, tensor.shape, version)
    return tensor
