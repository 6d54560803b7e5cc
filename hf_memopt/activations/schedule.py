"""One forward pass: what it saved, and what its backward needs next."""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hf_memopt.activations.planner import Plan
from hf_memopt.activations.residency import in_backward
from hf_memopt.activations.storages import OffloadedStorage
from hf_memopt.activations.timeline import Action

if TYPE_CHECKING:
    from hf_memopt.activations.engine import Engine
    from hf_memopt.activations.recording import Recorder, Recording


# How many bytes may wait for their copy to the host, as a multiple of the largest storage seen, before compute has to
# wait too. Two let one copy run while the next tensor is computed.
_STORAGES_IN_FLIGHT = 2
_UNFORESEEN = -1


class ReloadOrders:
    """Remembers in which order backward used the offloaded storages of a forward pass: learned, not assumed."""

    def __init__(self) -> None:
        # By index and size of what was offloaded: passes over other shapes do not disturb what was learned.
        self._orders: dict[tuple[tuple[int, int], ...], Sequence[int]] = {}

    def order(self, sizes: dict[int, int]) -> Sequence[int]:
        """Indices in the order of use; the reverse of saving until backward has shown better."""
        return self._orders.get(tuple(sizes.items())) or list(sizes)[::-1]

    def learn(self, sizes: dict[int, int], order: Sequence[int]) -> None:
        self._orders[tuple(sizes.items())] = order


class ForwardPass:
    """The storages of one device that one forward pass saved, and how far backward has come through them.

    Args:
        engine: copies from and to the device.
        prefetch_ahead: how many storages to bring back ahead of their use, in bytes: this many times the largest one,
            so that many small ones may be under way together.
        plan: what the planner decided: actions, windows in bytes, and the order of reloading. None: offload everything
            and learn as it goes.
        recording: what the plan was made from.
        budget_bytes: what the plan was made for.
        recorder: notes what happens when, for the planner.
        on_end: called once, at the end of the first backward through this pass.
    """

    def __init__(
        self,
        engine: "Engine",
        prefetch_ahead: int,
        *,
        plan: Plan | None = None,
        recording: "Recording | None" = None,
        budget_bytes: int | None = None,
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
        self.ended: Any = None
        self._prefetch_ahead = prefetch_ahead
        self._recording = recording
        self._budget_bytes = budget_bytes
        self._on_end = on_end
        self._backward_begun = False
        self._offloaded: dict[int, weakref.ref[OffloadedStorage]] = {}
        self._offloaded_sizes: dict[int, int] = {}
        self._largest_bytes = 0
        self._used: dict[int, None] = {}
        self._order: Sequence[int] = ()
        self._positions: dict[int, int] | None = None

    def next_index(self, num_bytes: int) -> int:
        """The place of the next storage that autograd saves."""
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
        if self.plan is None or not 0 <= index < len(self.plan.actions):
            return Action.OFFLOAD
        # Other shapes than those planned for must not break the budget.
        over = self._budget_bytes is not None and self.engine.residency.now_bytes + num_bytes > self._budget_bytes
        action = self.plan.actions[index]
        return Action.OFFLOAD if over and action is Action.KEEP else action

    def add(self, storage: OffloadedStorage) -> None:
        """Register an offloaded storage, and give up older ones where too many bytes are under way."""
        self._offloaded[storage.index] = weakref.ref(storage)
        self._offloaded_sizes[storage.index] = storage.num_bytes
        self._largest_bytes = max(self._largest_bytes, storage.num_bytes)
        self._positions = None
        in_flight_bytes = self.plan.in_flight_bytes if self.plan else _STORAGES_IN_FLIGHT * self._largest_bytes
        self.engine.leave(storage, in_flight_bytes)

    def about_to_use(self, storage: OffloadedStorage) -> None:
        """Note the use and start the copies of what follows."""
        self._used[storage.index] = None
        if self.plan is None and len(self._used) == len(self._offloaded):
            self.engine.orders.learn(self._offloaded_sizes, list(self._used))
        room = self.plan.prefetch_bytes if self.plan else self._prefetch_ahead * self._largest_bytes
        if room:
            self._prefetch_after(storage.index, room)

    def note_backward(self) -> None:
        """Have the end of the backward pass noted that has begun."""
        if not self._backward_begun and in_backward():
            self._backward_begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def elapsed_s(self) -> float:
        """Seconds from the first save to the end of backward; waits for the device."""
        return self.engine.clock.elapsed_s(self.begun, self.ended)

    def _end(self) -> None:
        self.ended = self.engine.clock.mark()
        self.engine.residency.settle()
        self.peak_bytes = self.engine.residency.peak_bytes
        if self._on_end:
            self._on_end(self)

    def _prefetch_after(self, index: int, room: int) -> None:
        if self._positions is None:
            self._order = self.plan.reload_order if self.plan else self.engine.orders.order(self._offloaded_sizes)
            self._positions = {which: position for position, which in enumerate(self._order)}
        # What a plan did not foresee has no place in its order, and nothing follows it.
        position = self._positions.get(index, len(self._order)) + 1
        while position < len(self._order):
            following = self._order[position]
            position += 1
            room -= self._offloaded_sizes.get(following, 0)
            if room < 0:
                return
            if following not in self._used and following in self._offloaded:
                storage = self._offloaded[following]()
                if storage is not None:
                    storage.prefetch()
