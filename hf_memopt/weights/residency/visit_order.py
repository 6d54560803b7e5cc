"""The order in which a pass visits storages, learned from the pass before: forward, recomputation and backward."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain

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
