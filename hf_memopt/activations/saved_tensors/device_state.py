"""State that all passes on one device share, and the order in which offloaded storages come back.

It sees storages by a few attributes, and no forward pass.
"""

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memopt.autograd_state import current_node
from hf_memopt.transfer.backends import backend_of
from hf_memopt.transfer.clock import Clock
from hf_memopt.transfer.copier import ALIGNMENT
from hf_memopt.transfer.lower_memory import LowerMemory, Place

logger = logging.getLogger(__name__)

# Memory below the device that this many passes have not needed is given back.
_TRIM_EVERY = 1000
# Of a pass with more saves and uses, such as one with thousands of backwards, the curve shows the first.
_MAX_NOTES = 50_000


# Orders remembered, each of as many numbers as a pass has storages.
_NUM_ORDERS = 256


class ReloadOrder:
    """The order in which storages are to be brought back; `bytes_before` are those before each, and last the sum."""

    def __init__(self, indices: Sequence[int], sizes: dict[int, int]) -> None:
        self.indices = indices
        self.positions = {index: position for position, index in enumerate(indices)}
        self.bytes_before = list(itertools.accumulate([sizes.get(index, 0) for index in indices], initial=0))


class ReloadOrders:
    """The orders in which backward used the offloaded storages of forward passes: learned, not assumed."""

    def __init__(self) -> None:
        # By index and size of the offloaded storages: passes over other shapes do not disturb a learned order.
        self._orders: dict[tuple[tuple[int, int], ...], ReloadOrder] = {}

    def order(self, sizes: dict[int, int]) -> ReloadOrder:
        """Return the order of use; the reverse of saving until backward has shown better."""
        return self._orders.get(tuple(sizes.items())) or ReloadOrder(list(sizes)[::-1], sizes)

    def learn(self, sizes: dict[int, int], indices: Sequence[int]) -> None:
        key = tuple(sizes.items())
        known = self._orders.pop(key, None)
        # The newest last: shapes that never come again are forgotten.
        self._orders[key] = known if known and known.indices == indices else ReloadOrder(indices, sizes)
        if len(self._orders) > _NUM_ORDERS:
            del self._orders[next(iter(self._orders))]


class HeldBytes(NamedTuple):
    """Device memory of saved activations at one save or use, and the memory that they would hold if all were kept."""

    held: int
    plain: int


class PassCurve(NamedTuple):
    """Device memory of saved activations at each save and use of a pass, in the host's order.

    The first `num_forward` of them belong to the forward pass.
    """

    notes: list[HeldBytes]
    num_forward: int


class DeviceBytes:
    """Counts the device memory that saved activations hold, in the order in which the host gives it out and takes it.

    A caching allocator counts in that order too, so the figure does not depend on how far the device has come. A
    storage whose last use has begun stays counted until another autograd node takes its turn, since the node at work
    still reads it. Callers that free memory at another moment decrement `now_bytes` themselves.

    Attributes:
        plain_bytes: the same if everything were kept, as without offloading.
        curve: both, at each save and use of the newest pass; the device's is the most since the note before.
    """

    def __init__(self) -> None:
        self.now_bytes = self.plain_bytes = 0
        self.begin_pass()
        self._ending_bytes = 0
        self._node: int | None = None

    def begin_pass(self) -> None:
        self.peak_bytes, self.plain_peak_bytes = self.now_bytes, self.plain_bytes
        self._most_since_note = self.now_bytes
        self.curve = PassCurve([], 0)
        self._is_in_forward = True

    def note(self) -> None:
        notes = self.curve.notes
        if len(notes) < _MAX_NOTES:
            notes.append(HeldBytes(self._most_since_note, self.plain_bytes))
        self._most_since_note = self.now_bytes

    def begin_backward(self) -> None:
        if self._is_in_forward:
            self._is_in_forward = False
            self.curve = PassCurve(self.curve.notes, len(self.curve.notes))

    def add_saved(self, num_bytes: int) -> None:
        """Count a storage that autograd has saved; it holds memory in a plain run too."""
        self.plain_bytes += num_bytes
        self.plain_peak_bytes = max(self.plain_peak_bytes, self.plain_bytes)

    def add(self, num_bytes: int) -> None:
        if self._ending_bytes:
            self.settle()
        self.now_bytes += num_bytes
        if self.now_bytes > self._most_since_note:
            self._most_since_note = self.now_bytes
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def remove_after_node(self, num_bytes: int) -> None:
        """Take memory out of the count once the autograd node at work, its last reader, is done."""
        self.settle()
        self._node = current_node()
        self._ending_bytes += num_bytes

    def settle(self) -> None:
        """Take out memory that ended with the last node, if another one is at work."""
        if self._ending_bytes and (self._node is None or current_node() != self._node):
            self.now_bytes -= self._ending_bytes
            self._ending_bytes = 0


class DeviceState:
    """The memories below one device, nearest first, its live storages, and copies under way.

    `lock` is held while this state changes, except by destructors.
    """

    def __init__(self, device: torch.device, lower: Sequence[LowerMemory], clock: Clock, lock: threading.RLock) -> None:
        self.lower, self.clock, self.lock = lower, clock, lock
        self.hide_operations = backend_of(device).hide_operations
        self.held = DeviceBytes()
        self.orders = ReloadOrders()
        self.bytes_moved = 0
        # Each live storage puts itself in, by key, and takes itself out when it dies.
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.num_passes = 0
        # A graph that is dropped takes its storages along, copies under way included.
        self._leaving: deque[weakref.ref[Any]] = deque()
        self._leaving_bytes = 0
        # The newest pass in which a failed copy was raised, 0 for none. Of its copies, and those of passes before it,
        # errors without a reader say nothing new; they may come late, since torch frees a failed graph on a thread of
        # its own while the host goes on.
        self.told_in = 0
        # The error of a copy whose reader was gone.
        self._failure: Exception | None = None

    @property
    def bytes_live(self) -> int:
        return sum(memory.bytes_live for memory in self.lower)

    def stall_ms(self) -> float:
        return sum(memory.stall_ms() for memory in self.lower)

    def acquire(self, num_bytes: int, storage: torch.UntypedStorage, first_choice: int = 0) -> Place | None:
        """Return a place for a part of a storage below the device, None where no memory has room for it."""
        for memory in (*self.lower[first_choice:], *self.lower[:first_choice]):
            block = memory.acquire(num_bytes, storage)
            if block is not None:
                return Place(memory, block)
        return None

    def trim(self) -> None:
        for memory in self.lower:
            memory.trim()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Note that an error of the copy inside is raised to its reader."""
        try:
            yield
        except Exception:
            self.told_in = self.num_passes
            raise

    def note_failure(self, error: Exception, of_pass: int) -> None:
        """Keep the error of a copy without a reader, for `raise_failure`."""
        if of_pass > self.told_in:
            logger.error("activation offloading: %s", str(error))  # log records outlive the step
            self._failure = error.with_traceback(None)  # whose frames keep the dying object

    def raise_failure(self) -> None:
        """Raise an error that was kept, once."""
        for memory in self.lower:
            while memory.failures:
                self.note_failure(*memory.failures.pop())
        error, self._failure = self._failure, None
        if error is not None:
            raise error

    def leave(self, storage: Any, in_flight_bytes: int) -> None:
        """Queue an offloaded storage whose copy has begun; if too many wait, the oldest give up memory, in order."""
        storage.is_leaving = True
        self._leaving.append(weakref.ref(storage))
        self._leaving_bytes += storage.num_bytes
        while self._leaving_bytes > in_flight_bytes:
            oldest = self._leaving.popleft()()
            if oldest is not None and oldest.is_leaving:
                oldest.let_go()

    def stay(self, storage: Any) -> None:
        if storage.is_leaving:
            storage.is_leaving = False
            self._leaving_bytes -= storage.num_bytes

    def empty_device(self, num_bytes: int, place: Place, first: int) -> Tensor:
        """Return device memory for a reload of bytes that lie behind the `first`.

        Where there is none, storages that wait on the queue give up theirs.
        """
        try:
            memory = place.memory.empty_device(num_bytes, place.block, first)
        except torch.OutOfMemoryError:
            if not self.let_all_go():
                raise
            memory = place.memory.empty_device(num_bytes, place.block, first)
        if memory.storage_offset() % ALIGNMENT:
            raise ValueError(
                f"the copier's empty_device returned memory that begins at byte "
                f"{memory.storage_offset()} of its storage; it has to begin at a multiple of {ALIGNMENT}"
            )
        return memory

    def let_all_go(self) -> bool:
        """Wait for all copies from the device and give up the memory; returns whether there was any."""
        leaving = [storage for storage in (entry() for entry in self._leaving) if storage and storage.is_leaving]
        for storage in leaving:
            storage.let_go()
        return bool(leaving)

    def begin_pass(self) -> None:
        self.num_passes += 1
        if self.num_passes % _TRIM_EVERY == 0:
            self.trim()
        for memory in self.lower:
            memory.begin_pass()
        self.raise_failure()
        self._leaving = deque(entry for entry in self._leaving if (storage := entry()) and storage.is_leaving)
        self.held.settle()
        self.held.begin_pass()


class Prefetcher:
    """Brings the offloaded storages of one pass back ahead of their use, in an order that is planned or learned."""

    def __init__(
        self, orders: ReloadOrders, prefetch_ahead: int, planned: Sequence[int] | None, planned_bytes: int
    ) -> None:
        self._orders, self._planned = orders, planned
        self._prefetch_ahead, self._planned_bytes = prefetch_ahead, planned_bytes
        self.largest_bytes = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        # Indices in the order of their first use ever, and those used in the backward at work.
        self._used: dict[int, None] = {}
        self._used_now: set[int] = set()
        # None until the first use.
        self._order: ReloadOrder | None = None
        self._fetched_to = self._last_used = 0
        self._largest_to_fetch: int | None = None

    def add(self, index: int, entry: weakref.ref[Any], num_bytes: int) -> None:
        self._storages[index] = entry
        self._sizes[index] = num_bytes
        self.largest_bytes = max(self.largest_bytes, num_bytes)
        self._order = self._largest_to_fetch = None

    def begin_use(self, index: int) -> None:
        self._used_now.add(index)
        if index not in self._used:
            self._used[index] = None
            if self._planned is None and len(self._used) == len(self._storages):
                self._orders.learn(self._sizes, list(self._used))
        room = self._prefetch_ahead * self._find_largest_to_fetch() if self._planned is None else self._planned_bytes
        if room:
            self._fetch_after(index, room)

    def _find_largest_to_fetch(self) -> int:
        """Return the bytes of the largest storage that had left the device when this backward first asked.

        One used before it leaves does not count: a language model's logits would have gigabytes fetched ahead.
        """
        if self._largest_to_fetch is None:
            found = ((self._sizes[index], entry()) for index, entry in self._storages.items())
            self._largest_to_fetch = max((size for size, storage in found if storage and storage.has_left), default=0)
        return self._largest_to_fetch

    def end_backward(self) -> None:
        self._largest_to_fetch = None
        self._used_now.clear()
        self._fetched_to = self._last_used = 0

    def _fetch_after(self, index: int, room: int) -> None:
        order = self._order or self._find_order()
        indices, bytes_before = order.indices, order.bytes_before
        # A storage that a plan did not foresee has no place in its order, and nothing follows it.
        first = order.positions.get(index, len(indices) - 1) + 1
        if first < self._last_used:  # not the order that was foreseen, or another backward
            self._fetched_to = 0
        self._last_used = first
        limit = bytes_before[first] + room
        position = max(first, self._fetched_to)
        while position < len(indices) and bytes_before[position + 1] <= limit:
            if not self._fetch(indices[position]):
                break
            position += 1
        self._fetched_to = position

    def _find_order(self) -> ReloadOrder:
        planned = self._planned
        self._order = self._orders.order(self._sizes) if planned is None else ReloadOrder(planned, self._sizes)
        self._fetched_to = self._last_used = 0
        return self._order

    def _fetch(self, index: int) -> bool:
        """Start bringing a storage back, if it is still to be used; returns False where there is no memory for it."""
        entry = self._storages.get(index)
        storage = entry() if entry is not None and index not in self._used_now else None
        if storage is not None:
            try:
                storage.prefetch()
            except torch.OutOfMemoryError:  # once it is needed, other memory may have become free
                return False
        return True
