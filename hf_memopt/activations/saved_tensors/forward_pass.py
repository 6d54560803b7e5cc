"""One forward pass: what it saved, and what its backward needs next."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_memopt.activations.planner.offload_plan import Plan
from hf_memopt.activations.planner.simulator import Action
from hf_memopt.activations.saved_tensors.device_bytes import NO_BACKWARD, current_backward
from hf_memopt.activations.saved_tensors.storages import LiveStorage, OffloadedStorage

if TYPE_CHECKING:
    from hf_memopt.activations.recording import Recorder, Recording
    from hf_memopt.activations.saved_tensors.device_context import Engine


# How many bytes may wait for their copy to the host, as a multiple of the largest storage seen, before compute has to
# wait too. Two let one copy run while the next tensor is computed.
_STORAGES_IN_FLIGHT = 2
_UNFORESEEN = -1
# How many orders are remembered, each of as many numbers as a pass has storages.
_NUM_ORDERS = 256


class ReloadOrder:
    """In which order storages are to be brought back.

    Args:
        indices: of the storages.
        sizes: bytes by index; what is missing there has not been offloaded.

    Attributes:
        positions: in the order, by index.
        bytes_before: what lies before each position, and last all of it.
    """

    def __init__(self, indices: Sequence[int], sizes: dict[int, int]) -> None:
        self.indices = indices
        self.positions = {index: position for position, index in enumerate(indices)}
        self.bytes_before = list(itertools.accumulate([sizes.get(index, 0) for index in indices], initial=0))


class ReloadOrders:
    """Remembers in which order backward used the offloaded storages of a forward pass: learned, not assumed."""

    def __init__(self) -> None:
        # By index and size of what was offloaded: passes over other shapes do not disturb what was learned.
        self._orders: dict[tuple[tuple[int, ...], tuple[int, ...]], ReloadOrder] = {}

    def order(self, sizes: dict[int, int]) -> ReloadOrder:
        """The order of use; the reverse of saving until backward has shown better."""
        return self._orders.get(_key(sizes)) or ReloadOrder(list(sizes)[::-1], sizes)

    def learn(self, sizes: dict[int, int], indices: Sequence[int]) -> None:
        """Backward has used everything."""
        key = _key(sizes)
        known = self._orders.pop(key, None)
        # The newest last: shapes that never come again are forgotten.
        self._orders[key] = known if known and known.indices == indices else ReloadOrder(indices, sizes)
        if len(self._orders) > _NUM_ORDERS:
            del self._orders[next(iter(self._orders))]


def _key(sizes: dict[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(sizes), tuple(sizes.values())


class ForwardPass:
    """The storages of one device that one context saved, and how far backward has come through them.

    Mostly that is one forward and one backward pass, but there may be any number of either, in any order.

    Args:
        engine: copies from and to the device.
        prefetch_ahead: how many storages to bring back ahead of their use, in bytes: this many times the largest one,
            so that many small ones may be under way together.
        plan: what the planner decided: actions, windows in bytes, and the order of reloading. None: offload everything
            and learn as it goes.
        recording: what the plan was made from.
        budget_bytes: what the plan was made for.
        is_for_these_sizes: whether a plan says nothing of passes that save more than the recorded one, because what
            they need besides is not known.
        recorder: notes what happens when, for the planner.
        on_end: called at the end of each backward through this pass.
    """

    def __init__(
        self,
        engine: "Engine",
        prefetch_ahead: int,
        *,
        plan: Plan | None = None,
        recording: "Recording | None" = None,
        budget_bytes: int | None = None,
        is_for_these_sizes: bool = False,
        recorder: "Recorder | None" = None,
        on_end: Callable[["ForwardPass"], None] | None = None,
    ) -> None:
        engine.begin_pass()
        self.engine = engine
        self.recorder = recorder
        self.plan = plan
        self.sizes: list[int] = []
        self.peak_bytes = 0
        self.begun: Any = engine.clock.mark()
        # Whether torch.profiler runs, and is to show copies.
        self.is_traced: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        self.ended: Any = None
        self._prefetch_ahead = prefetch_ahead
        self._recording = recording
        self._budget_bytes = budget_bytes
        self._is_for_these_sizes = is_for_these_sizes
        self._is_larger = False
        self._on_end = on_end
        # Backward passes at work, by torch's number: the outermost, then those that it runs inside of its nodes.
        self._backwards: list[int] = []
        self._movable: list[weakref.ref[LiveStorage]] = []
        self._offloaded: dict[int, weakref.ref[OffloadedStorage]] = {}
        self._offloaded_sizes: dict[int, int] = {}
        self._largest_bytes = 0
        self._used: dict[int, None] = {}
        self._used_now: set[int] = set()
        # In which order storages are to be brought back, None until somebody asks, and how far that has come.
        self._order: ReloadOrder | None = None
        self._fetched_to = self._last_used = 0

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward has begun and has not ended, or was broken off."""
        return bool(self._backwards)

    def next_index(self, num_bytes: int) -> int:
        """The place of the next storage that autograd saves."""
        self._backwards.clear()  # what has not ended by now was broken off by an exception
        self.sizes.append(num_bytes)
        return len(self.sizes) - 1

    def owner(self, index: int) -> str:
        """The module that saved a storage, as far as it was recorded."""
        owners = self._recording.owners if self._recording else ()
        return owners[index] if index < len(owners) else ""

    def source(self, index: int, place: int) -> int:
        """The index of the storage that the computation of another one reads in this place."""
        sources = self._recording.profile.storages[index].sources if self._recording else ()
        return sources[place] if place < len(sources) else _UNFORESEEN

    def action(self, index: int, num_bytes: int) -> Action:
        """What becomes of a storage."""
        if self.plan is None or self._recording is None or not 0 <= index < len(self.plan.actions):
            return Action.OFFLOAD
        planned = self._recording.profile.storages[index]
        self._is_larger = self._is_larger or (self._is_for_these_sizes and num_bytes > planned.num_bytes)
        if self._is_larger and planned.can_offload:
            return Action.OFFLOAD
        # Other shapes than those planned for must not break the budget.
        over = self._budget_bytes is not None and self.engine.residency.now_bytes + num_bytes > self._budget_bytes
        action = self.plan.actions[index]
        return Action.OFFLOAD if over and action is Action.KEEP and planned.can_offload else action

    def add(self, storage: OffloadedStorage) -> None:
        """Register an offloaded storage, and give up older ones where too many bytes are under way."""
        index, num_bytes = storage.index, storage.num_bytes
        entry: Any = weakref.ref(storage)
        self._offloaded[index] = entry
        self._movable.append(entry)
        self._offloaded_sizes[index] = num_bytes
        if num_bytes > self._largest_bytes:
            self._largest_bytes = num_bytes
        self._order = None
        in_flight_bytes = self.plan.in_flight_bytes if self.plan else _STORAGES_IN_FLIGHT * self._largest_bytes
        self.engine.leave(storage, in_flight_bytes)

    def watch(self, storage: LiveStorage) -> None:
        """Have a storage give up its device memory at the end of a backward that has read it."""
        self._movable.append(weakref.ref(storage))

    def release(self) -> None:
        """Give up all device memory of which the host has a copy."""
        self.engine.let_all_go()
        for entry in self._movable:
            storage = entry()
            if isinstance(storage, OffloadedStorage):
                storage.release()

    def about_to_use(self, storage: OffloadedStorage) -> None:
        """Note the use and start the copies of what follows."""
        index = storage.index
        self._used_now.add(index)
        if index not in self._used:
            self._used[index] = None
            if self.plan is None and len(self._used) == len(self._offloaded):
                self.engine.orders.learn(self._offloaded_sizes, list(self._used))
        room = self.plan.prefetch_bytes if self.plan else self._prefetch_ahead * self._largest_bytes
        if room:
            self._prefetch_after(index, room)

    def note_backward(self) -> int:
        """The number of the backward at work, 0 for none; has its end noted."""
        task = current_backward()
        if task == NO_BACKWARD:
            return 0
        if task not in self._backwards:
            self._backwards.append(task)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        return self._backwards[0] + 1

    def elapsed_s(self) -> float:
        """Seconds from the first save to the end of the last backward; waits for the device."""
        return self.engine.clock.elapsed_s(self.begun, self.ended)

    def _end(self, task: int) -> None:
        if task not in self._backwards:
            return
        outermost = self._backwards[0]
        del self._backwards[self._backwards.index(task) :]
        if self._backwards:
            return
        self.ended = self.engine.clock.mark()
        self._used_now.clear()
        self._fetched_to = self._last_used = 0
        for entry in self._movable:
            storage = entry()
            if storage is not None:
                storage.end_backward(outermost + 1)
        self._movable = [entry for entry in self._movable if entry() is not None]
        self.engine.residency.settle()
        self.peak_bytes = self.engine.residency.peak_bytes
        if self.recorder is not None:
            self.recorder.end_backward(self.ended)
        if self._on_end:
            self._on_end(self)

    def _prefetch_after(self, index: int, room: int) -> None:
        order = self._order or self._find_order()
        indices, bytes_before = order.indices, order.bytes_before
        # What a plan did not foresee has no place in its order, and nothing follows it.
        first = order.positions.get(index, len(indices) - 1) + 1
        if first < self._last_used:  # not the order that was foreseen, or another backward
            self._fetched_to = 0
        self._last_used = first
        limit = bytes_before[first] + room
        position = max(first, self._fetched_to)  # up to there nothing is left to fetch
        while position < len(indices) and bytes_before[position + 1] <= limit:
            if not self._prefetch(indices[position]):
                break
            position += 1
        self._fetched_to = position

    def _find_order(self) -> ReloadOrder:
        sizes = self._offloaded_sizes
        self._order = ReloadOrder(self.plan.reload_order, sizes) if self.plan else self.engine.orders.order(sizes)
        self._fetched_to = self._last_used = 0
        return self._order

    def _prefetch(self, index: int) -> bool:
        """Start bringing a storage back, if it is still to be used; false where there is no memory for it."""
        entry = self._offloaded.get(index)
        storage = entry() if entry is not None and index not in self._used_now else None
        if storage is not None:
            try:
                storage.prefetch()
            except torch.OutOfMemoryError:  # not before it is needed, then, when other memory may have become free
                return False
        return True
