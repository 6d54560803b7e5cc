"""Brings offloaded storages back ahead of their use, in the order that a plan foresees or earlier passes have shown."""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

# How many orders are remembered, each of as many numbers as a pass has storages.
_NUM_ORDERS = 256


class ReloadOrder:
    """In which order storages are to be brought back.

    Args:
        indices: indices of the storages.
        sizes: bytes by index; a storage missing there has not been offloaded.

    Attributes:
        positions: in the order, by index.
        bytes_before: bytes before each position, and last the sum.
    """

    def __init__(self, indices: Sequence[int], sizes: dict[int, int]) -> None:
        self.indices = indices
        self.positions = {index: position for position, index in enumerate(indices)}
        self.bytes_before = list(itertools.accumulate([sizes.get(index, 0) for index in indices], initial=0))


class ReloadOrders:
    """Remembers in which order backward used the offloaded storages of a forward pass: learned, not assumed."""

    def __init__(self) -> None:
        # By index and size of the offloaded storages: passes over other shapes do not disturb a learned order.
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
        """Return whether the device has given up the memory that was saved."""

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
        # The order in which storages are to be brought back, None until the first use, and how far that has come.
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
        """Note a use, and start the copies of the storages that follow in the order."""
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

        A storage that backward uses before it leaves is not fetched: a language model's logits, with which backward
        begins, would have gigabytes of other storages fetched ahead.
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
        # A storage that a plan did not foresee has no place in its order, and nothing follows it.
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
