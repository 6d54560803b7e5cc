"""The storages that have memory at the moment: those in use, those fetched ahead, and those that are kept."""

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack

from hf_memopt.weights.residency.storages import HELD, CastWeight, Storage
from hf_memopt.weights.residency.visit_order import Visit, VisitOrder

# Between them may be visits of storages that are there.
_MAX_VISITS_AHEAD = 32


class ResidentSet:
    """Brings storages for visits, fetches the next ones, and drops the others: first that which is visited last.

    Each use has a user, any object: the visits of a recomputed region and of the backward that asks for it overlap.
    To enter or leave once more as the same user does nothing, so that an interrupted one can be ended.

    Args:
        storages: by number.
        budget_bytes: for all of them together, with those that stay. What is in use is allowed anyway, and with it
            what the next visit needs.
        repeats: whether passes repeat, so that storages may be kept from one to the next; else a storage is dropped
            with its last visit in a pass.

    Attributes:
        device_bytes: of all storages that have memory.
        reasons: by number, the reason for which a storage stays.
        bytes_brought: to storages, so far.
        order: of the visits.
        visit_bytes: the least device memory for the visits of the last known pass; None before the first one.
    """

    def __init__(self, storages: Sequence[Storage], budget_bytes: float, repeats: bool) -> None:
        self.storages = storages
        self.reasons: dict[int, str] = {}
        self.device_bytes = self.peak_device_bytes = self.bytes_brought = 0
        self.visit_bytes: int | None = None
        self._budget_bytes = budget_bytes
        self._repeats = repeats
        self.order = VisitOrder(repeats, lambda numbers: self.bytes_of(set(numbers) - self.reasons.keys()))
        # The most bytes of a pass, and those of them that may be fetched ahead.
        self._capacity: float = 0
        self._ahead_bytes = 0
        self._ahead: set[int] = set()
        self._casts: set[CastWeight] = set()
        self._used: set[int] = set()
        # With memory and without users; and by the places of their next visits, some of them stale.
        self._unused: dict[int, float] = {}
        self._furthest: list[tuple[float, int]] = []

    def begin(self, kind: str, has_failed: bool) -> Sequence[Visit]:
        """Begin a pass of a kind, as `VisitOrder` does; `has_failed`, whether the pass before has."""
        visits = self.order.begin(kind, has_failed)
        self._ahead_bytes = max(map(self.bytes_of, visits), default=0)
        # An interrupt may have come before a change was counted.
        self._casts = {each for each in self._casts if each.users}
        self.device_bytes = sum(each.num_bytes for each in self.storages if each.has_memory)
        self.device_bytes += sum(each.num_bytes for each in self._casts)
        for number in [number for number, reason in self.reasons.items() if reason == HELD]:
            if not self.storages[number].is_held_by_others():
                del self.reasons[number]
                self.storages[number].stays = False
        self._unused, self._furthest, self._ahead = {}, [], set()
        self._used = {number for number, each in enumerate(self.storages) if each.users}
        for number, each in enumerate(self.storages):
            if each.has_memory and not each.users and not each.stays:
                self._put_down(number)
        self.end()
        self._capacity = 0
        if visits:
            self.visit_bytes = self.order.expected.bytes_at_once
            self.set_budget(self._budget_bytes)
        return visits

    def end(self) -> None:
        """Keep between passes what the budget allows, where they repeat."""
        capacity, self._capacity = self._capacity, self._budget_bytes if self._repeats else 0
        self._make_room(0)
        self._capacity = capacity

    def set_budget(self, budget_bytes: float) -> None:
        self._budget_bytes = budget_bytes
        if self.visit_bytes is not None:
            self._capacity = max(budget_bytes, self.visit_bytes + self.bytes_of(self.reasons))

    def keep(self, number: int, reason: str) -> None:
        """Make a storage keep its memory from its next visit on."""
        self.storages[number].stays = True
        self.reasons[number] = reason
        self._unused.pop(number, None)

    def enter(self, visit: Visit, user: object, cast: CastWeight | None = None, is_model: bool = True) -> None:
        """Bring the storages of a visit to the device, or a cast of its weight, and fetch those of the next visits.

        The order is learned from visits of the model alone.
        """
        if is_model:
            self.order.note(visit)
        for number in self.order.over():
            if number in self._unused and number not in visit:
                self._drop(number)
        if cast is None:
            self._take(visit, user)
        elif cast.users:
            cast.users.add(user)
        else:
            cast.users.add(user)
            self._casts.add(cast)
            self._take(visit, user)
            try:
                self._count(cast.num_bytes)
                cast.make()
            finally:
                self._give_up(visit, user)
        if is_model:
            cast_bytes = sum(each.num_bytes for each in self._casts if each.users)
            self.order.note_in_use(frozenset(self._used), cast_bytes)
        self.look_ahead()

    def leave(self, visit: Visit, user: object, cast: CastWeight | None = None) -> None:
        if cast is not None and user in cast.users:
            cast.users.discard(user)
            if not cast.users:
                cast.drop()
                self._count(-cast.num_bytes)
        self._give_up(visit, user)

    def resident(self) -> dict[str, list[int]]:
        """Return by reason the storages that stay, and those that have memory at the moment."""
        found: dict[str, list[int]] = {}
        for number, reason in self.reasons.items():
            found.setdefault(reason, []).append(number)
        used = [number for number, each in enumerate(self.storages) if each.users and number not in self.reasons]
        now = {"in use": used, "within the budget": sorted(self._unused.keys() - self._ahead)}
        return found | {reason: numbers for reason, numbers in now.items() if numbers}

    def bytes_of(self, numbers: Iterable[int]) -> int:
        return sum(self.storages[number].num_bytes for number in numbers)

    def drop_all(self) -> None:
        with ExitStack() as stack:  # an error keeps none of the others
            for number, storage in enumerate(self.storages):
                storage.users.clear()
                if storage.has_memory:
                    stack.callback(self._drop, number)

    def _take(self, visit: Visit, user: object) -> None:
        missing = [number for number in visit if not self.storages[number].has_memory]
        if missing:
            self._make_room(self.bytes_of(missing), visit)
        for number in visit:
            self._fetch(number)
            # From here on it is not dropped, nor lost if the next lines fail.
            self.storages[number].users.add(user)
            self._used.add(number)
            self._unused.pop(number, None)
            self._ahead.discard(number)
        for number in visit:
            self.storages[number].arrive()

    def _give_up(self, visit: Visit, user: object) -> None:
        for number in visit:
            storage = self.storages[number]
            storage.users.discard(user)
            if storage.users:
                continue
            self._used.discard(number)
            if not storage.stays:
                storage.rest()
                if storage.has_memory:
                    self._put_down(number)
        self._make_room(0)

    def _put_down(self, number: int) -> None:
        """Note that a storage is not used, and drop it where no next visit is expected."""
        place = self.order.next_use(number)
        self._unused[number] = place
        if math.isinf(place):
            self._drop(number)
        else:
            heapq.heappush(self._furthest, (-place, number))

    def look_ahead(self) -> None:
        """Fetch the next visits' storages, as many bytes as the largest visit has."""
        room = self._ahead_bytes - self.bytes_of(self._ahead)
        for place, visit in self.order.coming(_MAX_VISITS_AHEAD):
            for number in visit:
                storage = self.storages[number]
                if storage.has_memory:
                    continue
                room -= storage.num_bytes
                if room < 0 or not self._make_room(storage.num_bytes, visit, place):
                    return
                self._ahead.add(number)
                self._unused[number] = place
                heapq.heappush(self._furthest, (-place, number))
                self._fetch(number)

    def _fetch(self, number: int) -> None:
        storage = self.storages[number]
        had_memory = storage.has_memory
        try:
            storage.fetch()
        finally:
            if storage.has_memory and not had_memory:
                self.bytes_brought += storage.num_bytes
                self._count(storage.num_bytes)

    def _make_room(self, num_bytes: int, needed: Collection[int] = (), before: float = -1) -> bool:
        """Drop unused storages that are visited after a place, the last ones first; returns whether there is room."""
        put_back = []
        while self.device_bytes + num_bytes > self._capacity and self._furthest:
            place, number = heapq.heappop(self._furthest)
            if self._unused.get(number) != -place:
                continue
            if number in needed:
                put_back.append((place, number))
            elif -place <= before:
                put_back.append((place, number))
                break
            else:
                self._drop(number)
        for each in put_back:
            heapq.heappush(self._furthest, each)
        return self.device_bytes + num_bytes <= self._capacity

    def _drop(self, number: int) -> None:
        self._unused.pop(number, None)
        self._ahead.discard(number)
        storage = self.storages[number]
        reason = storage.reason_to_stay()
        if reason is not None:
            self.keep(number, reason)
            return
        had_memory = storage.has_memory
        try:
            storage.drop()
        finally:
            if had_memory and not storage.has_memory:
                self._count(-storage.num_bytes)
            elif storage.has_memory:  # its way home has failed
                self._unused[number] = math.inf
                heapq.heappush(self._furthest, (-math.inf, number))

    def _count(self, num_bytes: int) -> None:
        self.device_bytes += num_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)


def forecast(visits: Sequence[Visit], sizes: Sequence[int], budget_bytes: float) -> tuple[int, int]:
    """Return the peak of the device memory of a pass that does not repeat, and the bytes that it brings."""
    counted = ResidentSet([Storage(size) for size in sizes], budget_bytes, repeats=False)
    for _ in range(2):  # the first one is learned from
        brought = counted.bytes_brought
        counted.peak_device_bytes = 0
        counted.begin("", has_failed=False)
        counted.look_ahead()
        for visit in visits:
            counted.enter(visit, visit)
            counted.leave(visit, visit)
        counted.drop_all()
    return counted.peak_device_bytes, counted.bytes_brought - brought
