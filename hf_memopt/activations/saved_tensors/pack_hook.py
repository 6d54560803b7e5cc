"""What becomes of each tensor that autograd saves inside one `offload_context`."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_memopt.activations.callers import called_from_checkpoint, called_from_rrelu, may_be_cast_of_frozen_weight
from hf_memopt.activations.planner.simulator import Action
from hf_memopt.activations.recompute.op_recorder import Producers
from hf_memopt.activations.recompute.replay import Computation, RecomputedStorage, Resolver, Source
from hf_memopt.activations.saved_tensors.device_bytes import in_backward
from hf_memopt.activations.saved_tensors.forward_pass import ForwardPass
from hf_memopt.activations.saved_tensors.packed import KeptView, Payload, Restored, keep, restore
from hf_memopt.activations.saved_tensors.storages import LiveStorage
from hf_memopt.activations.saved_tensors.tensor_views import is_plain
from hf_memopt.transfer.device_types import PLAIN_TYPES, device_type

logger = logging.getLogger(__name__)


@dataclass
class Counters:
    """What all contexts of an offloader count, in bytes of saved tensors; see `OffloadStats`."""

    bytes_kept: int = 0
    bytes_weights: int = 0
    bytes_recomputed: int = 0
    bytes_deduplicated: int = 0
    subclasses: set[str] = field(default_factory=set)


class OffloadContext:
    """The pack hook of one context.

    Args:
        threshold_bytes: smaller storages are kept.
        fixed: keys of storages that never move: the model's weights and buffers.
        begin_pass: the forward pass on a device, None where nothing can be offloaded.
        counters: of the offloader.
        inputs_only: leave everything alone but the inputs of checkpointed regions.
        producers: notes on the operations performed, where storages may be computed again.
    """

    def __init__(
        self,
        threshold_bytes: int,
        fixed: frozenset[int],
        begin_pass: Callable[[torch.device], ForwardPass | None],
        counters: Counters,
        *,
        inputs_only: bool = False,
        producers: Producers | None = None,
    ) -> None:
        self._threshold_bytes, self._fixed = threshold_bytes, fixed
        self._begin_pass, self._counters = begin_pass, counters
        self._inputs_only, self._producers = inputs_only, producers
        self._passes: dict[torch.device, ForwardPass | None] = {}

    @property
    def has_begun(self) -> bool:
        """Whether anything was there to offload."""
        return bool(self._passes)

    def pack(self, tensor: Tensor) -> Payload:
        """The payload that autograd keeps instead of `tensor`."""
        if type(tensor) not in PLAIN_TYPES:
            return self._keep_subclass(tensor)
        if tensor.layout is not torch.strided or tensor.is_nested:  # memory of another kind, which is not counted
            return keep(tensor)
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if num_bytes < self._threshold_bytes:
            return self._keep(tensor)
        key = storage._cdata
        if key in self._fixed or is_weight(tensor):
            self._counters.bytes_weights += tensor.nbytes
            return keep(tensor)
        if in_backward():  # what backward itself saves (recomputation, double backward) is used at once
            return self._keep(tensor)
        if self._inputs_only or not tensor.requires_grad:
            caller = sys._getframe().f_back  # none in a thread that is not Python's
            if called_from_rrelu(caller) or (self._inputs_only and not called_from_checkpoint(caller)):
                return self._keep(tensor)
        forward = self._passes.get(tensor.device) or self._begin(tensor.device)
        if forward is None:
            return self._keep(tensor)
        if forward.recorder is None and self._producers is None:
            return self._save(tensor, key, num_bytes, forward)
        hide_operations = device_type(tensor.device).hide_operations
        # Our own operations are no part of the model's: neither timed nor noted.
        with forward.recorder.working() if forward.recorder else nullcontext(), hide_operations():
            return self._save(tensor, key, num_bytes, forward)

    def unpack(self, payload: Payload) -> Tensor:
        """The saved tensor, on its device and ready for the compute stream."""
        if self._producers is not None and in_backward():
            self._producers.leave_node()
        return restore(payload)

    def _save(self, tensor: Tensor, key: int, num_bytes: int, forward: ForwardPass) -> Payload:
        live = forward.engine.find(tensor, key)
        if live is None or live.saved_by is not forward:
            live = self._place(tensor, key, num_bytes, live, forward)
            live.saved_by = forward
        elif not live.is_kept:
            self._counters.bytes_deduplicated += tensor.nbytes
        if not live.is_kept:
            return Restored(live, tensor)
        if live.is_weight:
            self._counters.bytes_weights += tensor.nbytes
        else:
            self._counters.bytes_kept += tensor.nbytes
        return KeptView(live, tensor)

    def _place(
        self, tensor: Tensor, key: int, num_bytes: int, live: LiveStorage | None, forward: ForwardPass
    ) -> LiveStorage:
        """Give a storage its place in the pass, and put it where the plan says, unless it is somewhere already."""
        index = forward.next_index(num_bytes)
        action = forward.action(index, num_bytes)
        computation = None
        if self._producers is not None and (forward.recorder is not None or action is Action.RECOMPUTE):
            computation = self._resolve(tensor, forward)
        stays = not tensor.requires_grad and may_be_cast_of_frozen_weight(tensor)
        stays = stays or (computation is not None and computation.reads_weights_alone())
        if forward.recorder is not None:
            forward.recorder.saved(tensor.untyped_storage(), index, stays)
            if computation is not None:
                forward.recorder.computable(index, computation)
        if live is None:
            if stays and (action is Action.OFFLOAD or computation is None):
                action = Action.KEEP
            live = self._put(action, tensor, forward, index, computation)
            live.is_weight = stays
            live.num_writes = self._producers.num_writes(key) if self._producers is not None else None
        return live

    def _put(
        self, action: Action, tensor: Tensor, forward: ForwardPass, index: int, computation: Computation | None
    ) -> LiveStorage:
        if action is Action.RECOMPUTE and computation is not None:
            return self._recompute(tensor, forward, index, computation)
        if action is Action.KEEP:
            return forward.engine.keep(tensor, forward, index)
        # Also what was to be computed again, but has come about otherwise than when it was recorded.
        return forward.engine.offload(tensor, forward, index)

    def _resolve(self, tensor: Tensor, forward: ForwardPass) -> Computation | None:
        assert self._producers is not None
        return Resolver(self._producers, forward.engine.get).resolve(self._producers.operand(tensor))

    def _recompute(self, tensor: Tensor, forward: ForwardPass, index: int, computation: Computation) -> LiveStorage:
        places: dict[int, int] = {}
        for source in computation.sources():
            place = places.setdefault(source.key, len(places))
            if source.live is None:
                self._save_source(source, forward, forward.source(index, place))
        live = RecomputedStorage(tensor, forward, index, computation)
        forward.engine.register(live)
        forward.watch(live)
        self._counters.bytes_recomputed += live.num_bytes
        return live

    def _save_source(self, source: Source, forward: ForwardPass, index: int) -> None:
        """Keep or offload, for a storage's sake that is computed from it, what autograd has not saved."""
        assert source.tensor is not None
        source.live = forward.engine.find(source.tensor, source.key)
        if source.live is None:
            stays = forward.action(index, source.num_bytes) is Action.KEEP
            put = forward.engine.keep if stays else forward.engine.offload
            source.live = put(source.tensor, forward, index)
            assert self._producers is not None
            source.live.num_writes = self._producers.num_writes(source.key)
        source.tensor = None

    def _begin(self, device: torch.device) -> ForwardPass | None:
        if device not in self._passes:
            self._passes[device] = self._begin_pass(device)
        return self._passes[device]

    def _keep(self, tensor: Tensor) -> Payload:
        self._counters.bytes_kept += tensor.nbytes
        return keep(tensor)

    def _keep_subclass(self, tensor: Tensor) -> Payload:
        name = type(tensor).__name__
        if not isinstance(tensor, nn.Parameter) and name not in self._counters.subclasses:
            self._counters.subclasses.add(name)
            logger.info("activation offloading: saved tensors of type %s stay on the device", name)
        return keep(tensor)


def storages_of(model: nn.Module | None) -> frozenset[int]:
    """Keys of the storages of a model's weights and buffers, of those inside of packed and quantised ones too."""
    if model is None:
        return frozenset()
    tensors = [inner for tensor in (*model.parameters(), *model.buffers()) for inner in _inner_tensors(tensor.data)]
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors if is_plain(tensor))


def _inner_tensors(tensor: Any) -> Iterator[Tensor]:
    """The tensors that a tensor is made of: itself, or those that a subclass wraps."""
    if type(tensor) in PLAIN_TYPES or not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _inner_tensors(getattr(tensor, name))


def is_weight(tensor: Tensor) -> bool:
    """Whether a plain tensor is a leaf that requires grad, or a view or cast of one, reached without arithmetic.

    Its gradient's accumulator holds such a leaf in memory as long as the graph is alive, parameter or not.
    """
    if tensor._base is not None and isinstance(tensor._base, nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    if node is None:
        return tensor.requires_grad
    while type(node).__name__ in _RESHAPING and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return type(node).__name__ == "AccumulateGrad"


_RESHAPING = {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ToCopyBackward0"}
