"""One pass: places of the storages that it saves, and the one that its backward needs next.

The pass drives its storages in the order of the host's calls, never by how far the device has come. So each step
allocates and frees in the same order, and the planner's simulator predicts the peak to the byte. See
`activations/README.md`.
"""

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memopt.activations.pass_recorder import PassRecorder, RecordedPass
from hf_memopt.activations.planner.offload_plan import OffloadPlan
from hf_memopt.activations.planner.profile import Action, needs_by_backward
from hf_memopt.activations.recompute.op_tracer import OpTracer
from hf_memopt.activations.recompute.replay import Recomputation, RecomputedStorage, Resolver, StoredInput
from hf_memopt.activations.saved_tensors.device_state import DeviceState, PassCurve, Prefetcher
from hf_memopt.activations.saved_tensors.shown_elements import is_whole
from hf_memopt.activations.saved_tensors.storages import (
    ForeseenReads,
    KeptStorage,
    LiveStorage,
    OffloadedStorage,
    OwnCopy,
)
from hf_memopt.activations.stats import OffloadCounters
from hf_memopt.autograd_state import NO_BACKWARD, current_backward, may_be_cast_of_frozen_weight, next_node
from hf_memopt.transfer.clock import Clock
from hf_memopt.uncompiled import uncompiled

# Bytes that may wait for their copy from the device before compute has to, as a multiple of the largest storage seen.
# Two let one copy run while the next tensor is computed.
_STORAGES_IN_FLIGHT = 2
_UNFORESEEN = -1


class View:
    """A saved tensor; `read_in` is the number of the backward pass that unpacked it last."""

    __slots__ = ("_pass", "_storage", "read_in")

    def __init__(self, storage: LiveStorage, this_pass: "OffloadedPass") -> None:
        # First, so that `__del__` undoes no more than that, should anything fail.
        self._storage, self._pass = storage, this_pass
        storage.num_views += 1
        this_pass.num_views += 1
        self.read_in = 0

    @uncompiled
    def __del__(self) -> None:
        self._pass.drop_view(self._storage)


class PassFigures(NamedTuple):
    """Figures of a pass that has ended, without what the pass holds."""

    plan: OffloadPlan | None
    peak_bytes: int
    plain_peak_bytes: int
    curve: PassCurve
    clock: Clock
    begun: Any
    ended: Any

    @property
    def rank(self) -> tuple[bool, int]:
        """Return a key by which passes that followed a plan, and larger ones, come last."""
        return self.plan is not None, self.plain_peak_bytes

    def elapsed_s(self) -> float:
        return self.clock.elapsed_s(self.begun, self.ended)


class OffloadedPass:
    """The storages of one device saved before a backward begins, and how far backward has come through them.

    Mostly that is one forward and one backward pass. Several contexts share a pass if no backward begins in between; a
    pass may go on saving after a backward, and have any number of backwards.

    Args:
        prefetch_ahead: storages to bring back ahead, in bytes of the largest that has left: many small ones at once.
        plan: actions and windows. None: offload everything and learn the order from backward.
        is_for_these_sizes: whether the plan does not hold for larger passes, whose other memory is not known.
        keeps_all: whether everything stays on the device, and hooks are of no use once the pass has begun.

    Attributes:
        peak_bytes: the most that saved activations held on the device until the last backward was over.
        plain_peak_bytes: the same if all had been kept.
        curve: both at each save and use until then.
        is_other_work: whether something that the plan computes again came about otherwise than in the recorded pass.
    """

    def __init__(
        self,
        device: DeviceState,
        prefetch_ahead: int,
        counters: OffloadCounters,
        *,
        plan: OffloadPlan | None = None,
        recording: RecordedPass | None = None,
        budget_bytes: int | None = None,
        is_for_these_sizes: bool = False,
        recorder: PassRecorder | None = None,
        keeps_all: bool = False,
        op_tracer: OpTracer | None = None,
        on_end: Callable[["OffloadedPass"], None] | None = None,
    ) -> None:
        device.begin_pass()
        self.device = device
        self.recorder = recorder
        self.plan = plan
        self.sizes: list[int] = []
        self.peak_bytes = self.plain_peak_bytes = 0
        self.curve = PassCurve([], 0)
        self.is_other_work = False
        self.op_tracer = op_tracer
        self.num_views = 0
        self._is_closed = False
        self.begun: Any = device.clock.mark()
        self.ended: Any = None
        # Whether saving a tensor has to be kept out of the notes on the model's own operations.
        self.is_observed = recorder is not None or op_tracer is not None
        # torch.profiler is to show copies.
        self._is_traced: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        self._counters = counters
        self.keeps_all = keeps_all
        self.recording = recording
        self._foreseen = ForeseenReads()
        if plan is not None and recording is not None and recording.profile.backward_ends_s:
            self._foreseen = ForeseenReads(needs_by_backward(recording.profile, plan.actions))
        self._budget_bytes = budget_bytes
        self._is_for_these_sizes = is_for_these_sizes
        self._is_larger = False
        self._on_end = on_end
        # Backward passes at work, by torch's number: the outermost, then those inside of its nodes.
        self._backwards: list[int] = []
        # Storages that give up device memory at the end of a backward.
        self._movable: list[weakref.ref[LiveStorage]] = []
        # Storages that the model still has, and those saved in a recorded pass.
        self._pending: list[weakref.ref[LiveStorage]] = []
        self._recorded: list[weakref.ref[LiveStorage]] = []
        planned = (None, 0) if plan is None else (plan.reload_order, plan.prefetch_bytes)
        self._prefetcher = Prefetcher(device.orders, prefetch_ahead, *planned)

    @property
    def is_open(self) -> bool:
        """Return whether a new context goes on with this pass: its saved tensors wait for a first backward."""
        return self.num_views > 0 and not self._is_closed

    def close(self) -> None:
        self._is_closed = True

    def working(self) -> AbstractContextManager[None]:
        return nullcontext() if self.recorder is None else self.recorder.working()

    def save(
        self, tensor: Tensor, key: int, num_bytes: int, of_function: bool = False, is_skipped: bool = False
    ) -> LiveStorage:
        """Return the storage behind a tensor, plain and strided, that autograd saves, put where the plan says.

        One copy serves all saved views of a storage, as long as they count modifications together and show nothing new.
        """
        node = next_node()
        live = self._get(key)
        if live is not None and (not live.serves(tensor, node, of_function) or (is_skipped and not live.is_kept)):
            live = None
        if live is not None and live.saved_by is None and not self._is_saved_source(live):
            live = None
        if live is None or live.saved_by is not self:
            live = self._place(tensor, key, num_bytes, live, of_function, is_skipped)
            live.saved_by = self
            live.count_as_saved()
        elif not live.is_kept:
            self._counters.bytes_deduplicated += tensor.nbytes
        if of_function:
            self._distrust(live, tensor)
        live.add_view(tensor, node)
        if self.recorder is not None and live.has_late_views:
            self.recorder.not_computable(live.index)
        if live.is_kept:
            if live.is_weight:
                self._counters.bytes_weights += tensor.nbytes
            else:
                self._counters.bytes_kept += tensor.nbytes
        self.device.held.note()
        return live

    def _is_saved_source(self, live: LiveStorage) -> bool:
        """Return whether a copy made for computing others is the storage that autograd saves now, as recorded."""
        return live.index == len(self.sizes) and live.num_writes == self._num_writes(live.key)

    def _num_writes(self, key: int) -> int | None:
        return None if self.op_tracer is None else self.op_tracer.num_writes(key)

    def _get(self, key: int) -> LiveStorage | None:
        entry = self.device.storages.get(key)
        return None if entry is None else entry()

    def _place(
        self, tensor: Tensor, key: int, num_bytes: int, live: LiveStorage | None, of_function: bool, is_skipped: bool
    ) -> LiveStorage:
        self._backwards.clear()  # a backward that has not ended by now was broken off by an exception
        self._ripen()
        index, num_writes = len(self.sizes), self._num_writes(key)
        self.sizes.append(num_bytes)
        action = self._action(index, num_bytes)
        recomputation = None
        is_noted = self.op_tracer is not None and (self.recorder is not None or action is Action.RECOMPUTE)
        if self.op_tracer is not None and is_noted and not of_function and not is_skipped:
            recomputation = Resolver(self.op_tracer, self._get).resolve(self.op_tracer.operand(tensor))
        if self.recorder is None and action is Action.RECOMPUTE and not self._is_as_recorded(index, recomputation):
            recomputation, self.is_other_work = None, True
        # Moving casts of frozen weights would copy all frozen weights in each step.
        is_weight = not tensor.requires_grad and may_be_cast_of_frozen_weight(tensor)
        is_weight = is_weight or (recomputation is not None and recomputation.reads_weights_alone())
        stays = is_weight or is_skipped
        if self.recorder is not None:
            self.recorder.saved(tensor.untyped_storage(), index, stays, num_writes, of_function)
            if recomputation is not None:
                self.recorder.computable(index, recomputation)
        if live is None:
            if stays and (action is Action.OFFLOAD or recomputation is None):
                action = Action.KEEP
            is_pending = self._may_last(tensor, index, num_bytes)
            if action is Action.RECOMPUTE and recomputation is not None:
                live = self._recompute(tensor, index, recomputation)
            elif action is Action.KEEP:
                live = KeptStorage(tensor, self.device, index, is_pending)
            else:  # also one to be computed again that came about otherwise than in the recording
                live = self._offload(tensor, index, is_pending=is_pending)
            live.foreseen = self._foreseen
            live.is_weight = is_weight
            if live.is_pending:
                self._pending.append(weakref.ref(live))
            if self.recorder is not None:
                self._recorded.append(weakref.ref(live))
        live.num_writes = num_writes
        if self.recorder is not None and not live.is_pending:
            self.recorder.begun(index)
        return live

    def _distrust(self, live: LiveStorage, tensor: Tensor) -> None:
        """Note that a custom function has a storage, which its kernels may write to in forward and in backward."""
        live.of_function = True
        if self.op_tracer is not None:
            self.op_tracer.distrust(tensor.untyped_storage())
        if self.recorder is not None:
            self.recorder.not_computable(live.index)

    def _may_last(self, tensor: Tensor, index: int, num_bytes: int) -> bool:
        """Return whether parts may be saved later, or the storage outlives backward: a copy would free nothing."""
        is_lasting = self.recording is not None and index in self.recording.lasting
        return is_lasting or not is_whole(tensor, num_bytes)

    def _ripen(self) -> None:
        if not self._pending:
            return
        pending = [storage for entry in self._pending if (storage := entry()) is not None]
        for storage in pending:
            # Backward needs no copy of a storage that it has read already.
            if storage.read_in == 0 and storage.is_left_alone():
                storage.ripen()
                storage.count_as_saved()
                if self.recorder is not None:
                    self.recorder.begun(storage.index)
                if isinstance(storage, OffloadedStorage) and storage.num_copied_bytes:
                    self._leave(storage)
        self._pending = [weakref.ref(storage) for storage in pending if storage.is_pending]

    def _offload(
        self, tensor: Tensor, index: int, *, is_private: bool = False, is_pending: bool = False
    ) -> LiveStorage:
        """Start copying a storage to a lower memory, or keep it where none has room.

        The model may go on to write to a private one; a pending one waits until the model has let go of it.
        """
        device = self.device
        memory = self.plan.memories[index] if self.plan is not None and 0 <= index < len(self.plan.memories) else 0
        storage = tensor.untyped_storage()
        place = None if is_pending else device.acquire(storage.nbytes(), storage, memory)
        if place is None and not is_pending:
            return OwnCopy(tensor, device, index) if is_private else KeptStorage(tensor, device, index)
        owner = self._owner(index)
        offloaded = OffloadedStorage(tensor, device, index, place, self._prefetcher, is_private, memory, owner)
        self._movable.append(weakref.ref(offloaded))
        if not is_pending:
            self._leave(offloaded)
        return offloaded

    def _leave(self, storage: OffloadedStorage) -> None:
        self.device.bytes_moved += storage.num_copied_bytes
        entry: Any = weakref.ref(storage)
        self._prefetcher.add(storage.index, entry, storage.num_bytes)
        largest_bytes = self._prefetcher.largest_bytes
        self.device.leave(storage, self.plan.in_flight_bytes if self.plan else _STORAGES_IN_FLIGHT * largest_bytes)

    def _recompute(self, tensor: Tensor, index: int, recomputation: Recomputation) -> LiveStorage:
        # The plan counts each source once, in the order of their first mention.
        places: dict[int, int] = {}
        planned = self.recording.profile.storages[index].sources if self.recording else ()
        for source in recomputation.sources():
            place = places.setdefault(source.key, len(places))
            if source.live is None:
                self._save_source(source, planned[place] if place < len(planned) else _UNFORESEEN)
        live = RecomputedStorage(tensor, self.device, index, recomputation, self._owner(index))
        self._movable.append(weakref.ref(live))
        self._counters.bytes_recomputed += live.num_bytes
        return live

    def _save_source(self, source: StoredInput, index: int) -> None:
        """Copy a source that autograd has not saved: the model is free to write to its own memory of it."""
        tensor = source.tensor
        assert tensor is not None
        num_writes = self._num_writes(source.key)
        live = self._get(source.key)
        if live is None or not live.has_own_bytes_of(tensor) or live.num_writes != num_writes:
            stays = self._action(index, source.num_bytes) is Action.KEEP
            live = OwnCopy(tensor, self.device, index) if stays else self._offload(tensor, index, is_private=True)
            live.num_writes = num_writes
            live.foreseen = self._foreseen
        source.live, source.tensor = live, None

    def _action(self, index: int, num_bytes: int) -> Action:
        if self.keeps_all:
            return Action.KEEP
        if self.plan is None or self.recording is None or not 0 <= index < len(self.plan.actions):
            return Action.OFFLOAD
        planned = self.recording.profile.storages[index]
        is_larger = num_bytes > planned.num_bytes and index not in self.recording.lasting
        self._is_larger = self._is_larger or (self._is_for_these_sizes and is_larger)
        if self._is_larger and planned.can_offload:
            return Action.OFFLOAD
        # Other shapes than those planned for must not break the budget.
        over = self._budget_bytes is not None and self.device.held.now_bytes + num_bytes > self._budget_bytes
        action = self.plan.actions[index]
        return Action.OFFLOAD if over and action is Action.KEEP and planned.can_offload else action

    def _is_as_recorded(self, index: int, recomputation: Recomputation | None) -> bool:
        recorded = self.recording.operations.get(index) if self.recording is not None else None
        return recomputation is not None and recomputation.operations() == recorded

    def _owner(self, index: int) -> str | None:
        if not self._is_traced:
            return None
        owners = self.recording.owners if self.recording else ()
        return owners[index] if index < len(owners) else ""

    def use(self, storage: LiveStorage, view: View) -> Tensor:
        """Return the bytes, `(num_bytes,)` uint8; a RuntimeError if the tensor was modified in place since."""
        backward = self._note_backward()
        storage.check()
        is_first = view.read_in != backward
        view.read_in = backward
        if self.recorder is None or backward == 0 or not is_first:
            memory = storage.fetch(backward, is_first)
        else:
            with self.recorder.using(storage.index):
                memory = storage.fetch(backward, is_first)
        self.device.held.note()
        return memory

    def note_use(self, storage: LiveStorage, view: View) -> None:
        """Note that a saved tensor is unpacked of which nothing has to be fetched."""
        backward = self._note_backward()
        if self.recorder is not None and view.read_in != backward:
            with self.recorder.using(storage.index):
                view.read_in = backward
        storage.read_in = backward
        self.device.held.note()

    def drop_view(self, storage: LiveStorage) -> None:
        storage.num_views -= 1
        self.num_views -= 1
        if self.recorder is not None and storage.num_views == 0 and not sys.is_finalizing():
            self.recorder.freed(storage.index)

    def release(self) -> None:
        self.device.let_all_go()
        for entry in self._movable:
            storage = entry()
            if isinstance(storage, OffloadedStorage):
                storage.release()

    def _note_backward(self) -> int:
        """Return the number of the backward at work, 0 for none; has its end noted."""
        task = current_backward()
        if task == NO_BACKWARD:
            return 0
        if task not in self._backwards:
            self._is_closed = True
            self.device.held.begin_backward()
            if not self._backwards and (self._pending or self._recorded):
                with self.working():
                    self._begin_backward()
            self._backwards.append(task)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_locked, task))
        return self._backwards[0] + 1

    def _begin_backward(self) -> None:
        self._ripen()
        # Storages that the model still has now outlive the forward pass.
        recorded, self._recorded = self._recorded, []
        for entry in recorded:
            storage = entry()
            if storage is not None and self.recorder is not None and not storage.is_left_alone():
                self.recorder.lasts(storage.index)

    def elapsed_s(self) -> float:
        return self.figures().elapsed_s()

    def figures(self) -> PassFigures:
        times = self.device.clock, self.begun, self.ended
        return PassFigures(self.plan, self.peak_bytes, self.plain_peak_bytes, self.curve, *times)

    @uncompiled
    def _end_locked(self, task: int) -> None:
        with self.device.lock:
            self._end(task)

    def _end(self, task: int) -> None:
        if task not in self._backwards:
            return
        outermost = self._backwards[0]
        del self._backwards[self._backwards.index(task) :]
        if self._backwards:
            return
        # Storages that the outermost backward brought back go, and the next one starts anew.
        self.ended = self.device.clock.mark()
        self._foreseen.end_backward()
        self._prefetcher.end_backward()
        for entry in self._movable:
            storage = entry()
            if storage is not None:
                storage.end_backward(outermost + 1)
        self._movable = [entry for entry in self._movable if entry() is not None]
        self.device.held.settle()
        self.peak_bytes, self.plain_peak_bytes = self.device.held.peak_bytes, self.device.held.plain_peak_bytes
        self.device.held.note()
        self.curve = self.device.held.curve
        if self.recorder is not None:
            self.recorder.end_backward(self.ended)
        if self._on_end:
            self._on_end(self)
        self.device.raise_failure()
