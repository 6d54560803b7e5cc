"""Brings offloaded storages back ahead of their use, in the order that a plan foresees or earlier passes have shown."""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

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
