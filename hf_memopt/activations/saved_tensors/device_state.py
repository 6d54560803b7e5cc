"""What all forward passes on one device share: its host memory, what is stored there, and what is on its way.

Facts and queues only. A `DeviceState` knows storages by a few attributes and never sees a forward pass.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_memopt.autograd_state import current_node
from hf_memopt.transfer import Copier, clock_for
from hf_memopt.transfer.copier import ALIGNMENT
from hf_memopt.transfer.device_types import device_type
from hf_memopt.transfer.host_arena import HostArena

# Host memory that this many passes have not needed is given back.
_TRIM_EVERY = 1000
# How many orders are remembered, each of as many numbers as a pass has storages.
_NUM_ORDERS = 256


class DeviceBytes:
    """Counts the device memory that saved activations hold, in the order in which the host gives it out and takes it.

    A caching allocator counts in that order too, so the figure does not depend on how far the device has come. A
    storage whose last use has begun stays counted until another autograd node takes its turn, since the node at work
    still reads it. Whoever gives memory up at another moment takes it out of `now_bytes`.
    """

    def __init__(self) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0
        self._ending_bytes = 0
        self._node: int | None = None

    def add(self, num_bytes: int) -> None:
        """Count memory that a storage has taken."""
        if self._ending_bytes:
            self.settle()
        self.now_bytes += num_bytes
        if self.now_bytes > self.peak_bytes:
            self.peak_bytes = self.now_bytes

    def remove_after_node(self, num_bytes: int) -> None:
        """Take memory out of the count once the autograd node at work, its last reader, is done."""
        self.settle()
        self._node = current_node()
        self._ending_bytes += num_bytes

    def settle(self) -> None:
        """Take out what ended with the last node, if another one is at work."""
        if self._ending_bytes and (self._node is None or current_node() != self._node):
            self.now_bytes -= self._ending_bytes
            self._ending_bytes = 0


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
        """Return the order of use; the reverse of saving until backward has shown better."""
        return self._orders.get(_key(sizes)) or ReloadOrder(list(sizes)[::-1], sizes)

    def learn(self, sizes: dict[int, int], indices: Sequence[int]) -> None:
        """Note the order in which a backward has used everything."""
        key = _key(sizes)
        known = self._orders.pop(key, None)
        # The newest last: shapes that never come again are forgotten.
        self._orders[key] = known if known and known.indices == indices else ReloadOrder(indices, sizes)
        if len(self._orders) > _NUM_ORDERS:
            del self._orders[next(iter(self._orders))]


def _key(sizes: dict[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(sizes), tuple(sizes.values())


class Offloaded(Protocol):
    """A storage that the host has, as the prefetcher sees it."""

    index: int

    @property
    def has_left(self) -> bool:
        """Whether the device has given up the memory that was saved."""

    def prefetch(self) -> None:
        """Start bringing the bytes back, unless they are here or on their way."""


class Prefetcher:
    """Brings the offloaded storages of one pass back ahead of their use.

    Args:
        orders: in which order passes like this one used theirs.
        prefetch_ahead: how many storages to bring back ahead of their use without a plan, in bytes of the largest.
        planned: the order that a plan foresees; None to learn it.
        planned_bytes: how many to bring back ahead with a plan.

    Attributes:
        largest_bytes: the size of the largest offloaded storage so far.
    """

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
        # In which order storages are to be brought back, None until somebody asks, and how far that has come.
        self._order: ReloadOrder | None = None
        self._fetched_to = self._last_used = 0
        self._largest_to_fetch: int | None = None

    def add(self, index: int, entry: weakref.ref[Any], num_bytes: int) -> None:
        """Note a storage that is being offloaded."""
        self._storages[index] = entry
        self._sizes[index] = num_bytes
        if num_bytes > self.largest_bytes:
            self.largest_bytes = num_bytes
        self._order = self._largest_to_fetch = None

    def begin_use(self, storage: Offloaded) -> None:
        """Note a use, and start the copies of what follows it in the order."""
        index = storage.index
        self._used_now.add(index)
        if index not in self._used:
            self._used[index] = None
            if self._planned is None and len(self._used) == len(self._storages):
                self._orders.learn(self._sizes, list(self._used))
        is_planned = self._planned is not None
        room = self._planned_bytes if is_planned else self._prefetch_ahead * self._find_largest_to_fetch()
        if room:
            self._fetch_after(index, room)

    def _find_largest_to_fetch(self) -> int:
        """Return the bytes of the largest storage that had left the device when this backward first asked.

        What backward uses before it leaves is not fetched: a language model's logits, with which backward begins, would
        have gigabytes of other storages fetched ahead.
        """
        if self._largest_to_fetch is None:
            found = ((self._sizes[index], entry()) for index, entry in self._storages.items())
            self._largest_to_fetch = max((size for size, storage in found if storage and storage.has_left), default=0)
        return self._largest_to_fetch

    def end_backward(self) -> None:
        """Begin anew: the next backward may use everything again."""
        self._largest_to_fetch = None
        self._used_now.clear()
        self._fetched_to = self._last_used = 0

    def _fetch_after(self, index: int, room: int) -> None:
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
            if not self._fetch(indices[position]):
                break
            position += 1
        self._fetched_to = position

    def _find_order(self) -> ReloadOrder:
        known = self._planned is not None
        self._order = ReloadOrder(self._planned or (), self._sizes) if known else self._orders.order(self._sizes)
        self._fetched_to = self._last_used = 0
        return self._order

    def _fetch(self, index: int) -> bool:
        """Start bringing a storage back, if it is still to be used; returns False where there is no memory for it."""
        entry = self._storages.get(index)
        storage: Offloaded | None = entry() if entry is not None and index not in self._used_now else None
        if storage is not None:
            try:
                storage.prefetch()
            except torch.OutOfMemoryError:  # not before it is needed, then, when other memory may have become free
                return False
        return True


class Outgoing(Protocol):
    """A storage whose copy to the host has begun, as the queue of such copies sees it."""

    num_bytes: int
    is_leaving: bool

    def let_go(self) -> None:
        """Give up the device memory once the copy is over."""


class DeviceState:
    """The state that all forward passes on one device share.

    Args:
        device: where the passes compute.
        copier: moves the bytes.
        host_budget_bytes: of the arena.

    Attributes:
        clock: the compute stream's.
        hide_operations: makes a context in which no dispatch mode sees what is done.
    """

    def __init__(self, device: torch.device, copier: Copier, host_budget_bytes: int | None) -> None:
        self.copier = copier
        self.clock = clock_for(device)
        self.hide_operations = device_type(device).hide_operations
        self.arena = HostArena(copier, host_budget_bytes)
        self.held = DeviceBytes()
        self.orders = ReloadOrders()
        self.bytes_moved = 0
        # The live storages by key, as weak references. Each storage puts itself in and takes itself out when it dies.
        self.storages: dict[int, weakref.ref[Any]] = {}
        self._num_passes = 0
        # Weak: a graph that is dropped takes its storages along, copies under way included.
        self._leaving: deque[weakref.ref[Outgoing]] = deque()
        self._leaving_bytes = 0

    def leave(self, storage: Outgoing, in_flight_bytes: int) -> None:
        """Queue a storage whose copy to the host has begun; the oldest give up their memory where too many wait.

        They do so in this order and at this moment only, however far the device has come: then each step allocates and
        frees in the same order as the last one.
        """
        storage.is_leaving = True
        self._leaving.append(weakref.ref(storage))
        self._leaving_bytes += storage.num_bytes
        while self._leaving_bytes > in_flight_bytes:
            oldest = self._leaving.popleft()()
            if oldest is not None and oldest.is_leaving:
                oldest.let_go()

    def stay(self, storage: Outgoing) -> None:
        """Take a storage off the queue: it has given up its memory, or backward has claimed it."""
        if storage.is_leaving:
            storage.is_leaving = False
            self._leaving_bytes -= storage.num_bytes

    def empty_device(self, num_bytes: int) -> Tensor:
        """Return device memory for what comes back. Where there is none, what waits on the queue gives up its own."""
        try:
            memory = self.copier.empty_device(num_bytes)
        except torch.OutOfMemoryError:
            if not self.let_all_go():
                raise
            memory = self.copier.empty_device(num_bytes)
        if memory.storage_offset() % ALIGNMENT:
            raise ValueError(
                f"{type(self.copier).__name__}.empty_device returned memory that begins at byte "
                f"{memory.storage_offset()} of its storage; it has to begin at a multiple of {ALIGNMENT}"
            )
        return memory

    def let_all_go(self) -> bool:
        """Wait for all copies to the host and give up the memory; returns whether there was any."""
        leaving = [storage for storage in (entry() for entry in self._leaving) if storage and storage.is_leaving]
        for storage in leaving:
            storage.let_go()
        return bool(leaving)

    def begin_pass(self) -> None:
        """Forget the copies that are over, and count the peak anew."""
        self._num_passes += 1
        if self._num_passes % _TRIM_EVERY == 0:
            self.arena.trim()
        self.arena.log_growth()
        self._leaving = deque(entry for entry in self._leaving if (storage := entry()) and storage.is_leaving)
        self.held.settle()
        self.held.peak_bytes = self.held.now_bytes
