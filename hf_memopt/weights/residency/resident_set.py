"""The storages that have memory at the moment: those in use, those fetched ahead, and those that are kept.

The order in which a pass visits them is learned from the pass before: forward, recomputation and backward.
"""

import heapq
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain

from hf_memopt.weights.residency.storages import HELD, CastWeight, Storage

Visit = tuple[int, ...]

# More than a step has. A loop that no pass encloses, such as generation, must not be recorded for ever.
_MAX_VISITS = 50_000
# Visits of the largest region that counts as one.
_MAX_REGION = 100


class _Expected:
    """The visits of a pass.

    Attributes:
        bytes_at_once: the most that it needs at once: what is in use, with what the next visit needs. A region that is
            visited again at once, as when it is recomputed and then differentiated, counts as one visit if it needs no
            more than the largest one.
        places: by storage, the places of its visits.
        loop_ends: by storage, the place behind the loop that visits it, or behind its only visit.
        over: by place, the storages whose loop ends there.
    """

    def __init__(self, visits: Sequence[Visit], bytes_at_once: int) -> None:
        self.visits = visits
        self.bytes_at_once = bytes_at_once
        self.places: dict[int, list[int]] = defaultdict(list)
        for place, visit in enumerate(visits):
            for number in visit:
                self.places[number].append(place)
        self.loop_ends = _loop_ends(self.places)
        self.over: dict[int, list[int]] = defaultdict(list)
        for number, end in self.loop_ends.items():
            self.over[end].append(number)


class VisitOrder:
    """The visits of the last pass of each kind, and the place in them where the present pass is.

    A visit is the storages that a module or its backward needs, always the same tuple for the same module.

    Args:
        repeats: whether a pass is expected to come again, so that after the last visit comes the first one.
        bytes_of: storages, without those that stay anyway.
    """

    def __init__(self, repeats: bool, bytes_of: Callable[[Collection[int]], int]) -> None:
        self._repeats, self._bytes_of = repeats, bytes_of
        self._learned: dict[str, _Expected] = {}
        self._kind = ""
        self.expected = _NONE
        self._recorded: list[Visit] = []
        # Storages in use, and bytes of casts, at each of these visits.
        self._in_use: list[tuple[frozenset[int], int]] = []
        self._place = 0
        self._is_lost = False

    def begin(self, kind: str, has_failed: bool) -> Sequence[Visit]:
        """Begin a pass, such as "training"; returns the visits that are expected, none where it is the first.

        One that has failed is not learned from.
        """
        if self._recorded and not has_failed and self._is_new(self._learned.get(self._kind, _NONE).visits):
            self._learned[self._kind] = _Expected(self._recorded, self._needed_at_once())
        self._kind, self._recorded, self._in_use, self._place, self._is_lost = kind, [], [], 0, False
        self.expected = self._learned.get(kind, _NONE)
        return self.expected.visits

    def _is_new(self, known: Sequence[Visit]) -> bool:
        """Return whether there is something to learn: more than a known pass with fewer rounds of a loop."""
        if self._repeats or len(self._recorded) > len(known):
            return self._recorded != known
        return not set(self._recorded) <= set(known)

    def _needed_at_once(self) -> int:
        visits, needed = self._recorded, 0
        largest = max(map(self._bytes_of, visits))
        for place, visit in enumerate(visits):
            region = set(visit)
            for before in range(place - 1, max(place - _MAX_REGION, -1), -1):
                used, cast_bytes = self._in_use[before]
                if before == place - 1 or not region.isdisjoint(visits[before]):
                    needed = max(needed, self._bytes_of(used | region) + cast_bytes)
                region |= set(visits[before])
                if self._bytes_of(region) > largest:
                    break
        return max(needed, largest)

    def note(self, visit: Visit) -> None:
        """Note a visit, and move to the place behind it: the next one from here, or else from the beginning."""
        if len(self._recorded) < _MAX_VISITS:
            self._recorded.append(visit)
            self._in_use.append((frozenset(visit), 0))
        expected, here = self.expected.visits, self._place
        for place in chain(range(here, len(expected)), range(here)):
            if expected[place] is visit:
                self._place, self._is_lost = place + 1, False
                return
        self._is_lost = True

    def note_in_use(self, numbers: frozenset[int], cast_bytes: int) -> None:
        """Note the storages that are in use at the last noted visit, and the bytes of casts."""
        self._in_use[-1] = numbers, cast_bytes

    def is_over(self) -> bool:
        """Return whether no visit of the pass is expected any more."""
        return not self._is_lost and self._place == len(self.expected.visits)

    def coming(self, most: int) -> Iterator[tuple[int, Visit]]:
        """Yield place and storages of the visits that are expected next: none after one that was not expected."""
        if not self._is_lost:
            visits = self.expected.visits
            for place in range(self._place, min(self._place + most, len(visits))):
                yield place, visits[place]

    def next_use(self, number: int) -> float:
        """Return the place of a storage's next visit; infinity where none is expected.

        A loop may have more rounds than in the pass before. So its storages count as visited again until it is over,
        but later than all others.
        """
        expected = self.expected
        places = expected.places.get(number)
        if not places:
            return math.inf
        following = bisect_left(places, self._place)
        if following < len(places):
            return places[following]
        if self._repeats:
            return places[0] + len(expected.visits)
        return 2 * len(expected.visits) if self._place <= expected.loop_ends[number] and len(places) > 1 else math.inf

    def over(self) -> Sequence[int]:
        """Return the storages of the loop that was over right before the last visit."""
        return () if self._repeats else self.expected.over.get(self._place - 1, ())


def _loop_ends(places: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """A loop visits all its storages for the first time before it visits one of them for the last time."""
    numbers = sorted(places, key=lambda number: places[number][0])
    ends: dict[int, int] = {}
    for rank, number in enumerate(numbers):
        last = end = places[number][-1]
        for other in numbers[rank:] if len(places[number]) > 1 else ():
            if places[other][0] > last:
                break
            end = max(end, places[other][-1]) if len(places[other]) > 1 else end
        ends[number] = end + 1
    return ends


_NONE = _Expected([], 0)


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
