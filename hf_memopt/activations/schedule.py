"""What is needed next in backward: learned from the last pass, not assumed."""

import weakref

from hf_memopt.activations.payload import OffloadedStorage


class Prefetcher:
    """Remembers in which order backward used the storages of a forward pass.

    Args:
        num_ahead: how many storages to bring back ahead of their use. Bounded in bytes by `num_ahead` times the
            largest storage of the pass, so that many small ones may be under way together.
    """

    def __init__(self, num_ahead: int) -> None:
        self.num_ahead = num_ahead
        # By the sizes of the offloaded storages: passes over other shapes do not disturb what was learned.
        self._orders: dict[tuple[int, ...], list[int]] = {}

    def order(self, sizes: tuple[int, ...]) -> list[int]:
        """Ordinals in the order of use; the reverse of saving until backward has shown better."""
        return self._orders.get(sizes) or list(range(len(sizes)))[::-1]

    def learn(self, sizes: tuple[int, ...], order: list[int]) -> None:
        self._orders[sizes] = order


class ForwardPass:
    """The storages that one forward pass offloaded, and how far backward has come through them."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        self._storages: list[weakref.ref[OffloadedStorage]] = []
        self._sizes: list[int] = []
        self._used: dict[int, None] = {}
        self._order: list[int] | None = None
        self._positions: dict[int, int] = {}

    def add(self, storage: OffloadedStorage) -> int:
        """Register a storage; returns its ordinal."""
        self._storages.append(weakref.ref(storage))
        self._sizes.append(storage.num_bytes)
        self._order = None
        return len(self._sizes) - 1

    def about_to_use(self, storage: OffloadedStorage) -> None:
        """Note the use and start the copies of what follows."""
        self._used[storage.ordinal] = None
        if len(self._used) == len(self._sizes):
            self._prefetcher.learn(tuple(self._sizes), list(self._used))
        if self._prefetcher.num_ahead:
            self._prefetch_after(storage.ordinal)

    def _prefetch_after(self, ordinal: int) -> None:
        if self._order is None:
            self._order = self._prefetcher.order(tuple(self._sizes))
            self._positions = {which: position for position, which in enumerate(self._order)}
        room = self._prefetcher.num_ahead * max(self._sizes)
        for following in self._order[self._positions[ordinal] + 1 :]:
            room -= self._sizes[following]
            if room < 0:
                return
            storage = self._storages[following]()
            if storage is not None and following not in self._used:
                storage.prefetch()
