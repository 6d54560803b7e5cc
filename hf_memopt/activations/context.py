"""What becomes of each tensor that autograd saves inside one `offload_context`."""

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FrameType

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from hf_memopt.activations.payload import Kept, KeptView, Restored
from hf_memopt.activations.producers import Operand, Producers
from hf_memopt.activations.recompute import Computation, RecomputedStorage, Resolver, Source
from hf_memopt.activations.residency import in_backward
from hf_memopt.activations.schedule import ForwardPass
from hf_memopt.activations.storages import KeptStorage, LiveStorage
from hf_memopt.activations.tensors import VersionGuard
from hf_memopt.activations.timeline import Action
from hf_memopt.transfer.plain import PLAIN_TYPES

logger = logging.getLogger(__name__)

Payload = Kept | Restored


@dataclass
class Counters:
    """What all contexts of an offloader count."""

    bytes_kept: int = 0
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
        if tensor.layout is not torch.strided:
            return self._keep(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._threshold_bytes:
            return self._keep(tensor)
        if storage._cdata in self._fixed or is_weight(tensor):
            return Kept(tensor)
        # What backward itself saves (recomputation, double backward) is used at once.
        if in_backward() or (self._inputs_only and not _called_from_checkpoint()):
            return self._keep(tensor)
        forward = self._pass_on(tensor.device)
        if forward is None:
            return self._keep(tensor)
        if forward.recorder is None and self._producers is None:
            return self._save(tensor, forward)
        # Our own operations are no part of the model's: neither timed nor noted.
        with forward.recorder.working() if forward.recorder else nullcontext(), no_dispatch():
            return self._save(tensor, forward)

    def _save(self, tensor: Tensor, forward: ForwardPass) -> Payload:
        key, version = tensor.untyped_storage()._cdata, tensor._version
        live = forward.engine.find(key, version)
        if live is None or live.saved_by is not forward:
            live = self._place(tensor, key, live, forward)
            live.saved_by = forward
        elif not isinstance(live, KeptStorage):
            self._counters.bytes_deduplicated += tensor.nbytes
        if not isinstance(live, KeptStorage):
            return Restored(live, tensor)
        self._counters.bytes_kept += tensor.nbytes
        return KeptView(live, tensor)

    def _place(self, tensor: Tensor, key: int, live: LiveStorage | None, forward: ForwardPass) -> LiveStorage:
        """Give a storage its place in the pass, and put it where the plan says, unless it is somewhere already."""
        num_bytes = tensor.untyped_storage().nbytes()
        index = forward.next_index(num_bytes)
        action = forward.action(index, num_bytes)
        computation = None
        if forward.recorder is not None:
            forward.recorder.saved(key, index, num_bytes)
        if self._producers is not None and (forward.recorder is not None or action is Action.RECOMPUTE):
            computation = self._resolve(tensor, forward)
            if computation is not None and forward.recorder is not None:
                forward.recorder.computable(index, computation)
        if live is not None:
            return live
        if action is Action.RECOMPUTE:
            return self._recompute(tensor, forward, index, computation)
        return _put(action, tensor, VersionGuard(tensor), forward, index)

    def _resolve(self, tensor: Tensor, forward: ForwardPass) -> Computation | None:
        assert self._producers is not None
        find = forward.engine.find
        resolver = Resolver(self._producers, lambda operand: find(operand.key, operand.version))
        return resolver.resolve(Operand(tensor, self._fixed))

    def _recompute(
        self, tensor: Tensor, forward: ForwardPass, index: int, computation: Computation | None
    ) -> LiveStorage:
        if computation is None:  # other than it was when recorded
            return forward.engine.offload(tensor, VersionGuard(tensor), forward, index)
        places: dict[int, int] = {}
        for source in computation.sources():
            place = places.setdefault(source.key, len(places))
            if source.live is None:
                self._save_source(source, forward, forward.source(index, place))
        live = RecomputedStorage(tensor, VersionGuard(tensor), forward, index, computation)
        forward.engine.register(tensor, live)
        return live

    def _save_source(self, source: Source, forward: ForwardPass, index: int) -> None:
        """Keep or offload, for a storage's sake that is computed from it, what autograd has not saved."""
        assert source.tensor is not None
        source.live = forward.engine.find(source.key, source.guard.version)
        if source.live is None:
            action = forward.action(index, source.num_bytes)
            source.live = _put(action, source.tensor, source.guard, forward, index)
        source.tensor = None

    def _pass_on(self, device: torch.device) -> ForwardPass | None:
        if device not in self._passes:
            self._passes[device] = self._begin_pass(device)
        return self._passes[device]

    def _keep(self, tensor: Tensor) -> Kept:
        self._counters.bytes_kept += tensor.nbytes
        return Kept(tensor)

    def _keep_subclass(self, tensor: Tensor) -> Kept:
        name = type(tensor).__name__
        if not isinstance(tensor, nn.Parameter) and name not in self._counters.subclasses:
            self._counters.subclasses.add(name)
            logger.info("activation offloading: saved tensors of type %s stay on the device", name)
        return Kept(tensor)


def unpack(payload: Payload) -> Tensor:
    """The saved tensor, on its device and ready for the compute stream."""
    return payload.restore()


def storages_of(model: nn.Module | None) -> frozenset[int]:
    """Keys of the storages of a model's weights and buffers."""
    if model is None:
        return frozenset()
    tensors = [*model.parameters(), *model.buffers()]
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors if type(tensor.data) in PLAIN_TYPES)


def is_weight(tensor: Tensor) -> bool:
    """Whether a plain tensor is a view or an autocast copy of a parameter, reached without arithmetic."""
    if tensor._base is not None and isinstance(tensor._base, nn.Parameter):
        return True
    node = tensor.grad_fn
    name = "" if node is None else node.name()
    while node is not None and name in _RESHAPING and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
        name = "" if node is None else node.name()
    return name == "torch::autograd::AccumulateGrad"


_RESHAPING = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ToCopyBackward0")


def _put(action: Action, tensor: Tensor, guard: VersionGuard, forward: ForwardPass, index: int) -> LiveStorage:
    put = forward.engine.keep if action is Action.KEEP else forward.engine.offload
    return put(tensor, guard, forward, index)


def _called_from_checkpoint() -> bool:
    """Whether torch's checkpointing is saving the inputs of a region: it is what called autograd."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == torch.autograd.function.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == torch.utils.checkpoint.__file__
