"""The order in which a step visits storages, learned from the step before: forward, recomputation and backward."""

from collections.abc import Iterator
from itertools import chain

Visit = tuple[int, ...]

# More than a step has. A loop that no pass encloses, such as generation, must not be recorded for ever.
_MAX_VISITS = 50_000


class VisitOrder:
    """The visits of the last pass of each kind, and the place in them where the present pass is.

    A visit is the storages that a module or its backward needs, always the same tuple for the same module.
    """

    def __init__(self) -> None:
        self._learned: dict[str, list[Visit]] = {}
        self._kind = ""
        self._expected: list[Visit] = []
        self._recorded: list[Visit] = []
        self._place = 0
        self._is_lost = False

    def begin(self, kind: str, has_failed: bool) -> list[Visit]:
        """Begin a pass, such as "training"; returns the visits that are expected, none where it is the first.

        One that has failed is not learned from.
        """
        if self._recorded and not has_failed:
            self._learned[self._kind] = self._recorded
        self._kind, self._recorded, self._place, self._is_lost = kind, [], 0, False
        self._expected = self._learned.get(kind, [])
        return self._expected

    def note(self, visit: Visit) -> None:
        """Note a visit, and move to the place behind it: the next one from here, or else from the beginning."""
        if len(self._recorded) < _MAX_VISITS:
            self._recorded.append(visit)
        expected, here = self._expected, self._place
        for place in chain(range(here, len(expected)), range(here)):
            if expected[place] is visit:
                self._place, self._is_lost = place + 1, False
                return
        self._is_lost = True

    def coming(self, most: int) -> Iterator[Visit]:
        """Yield the visits that are expected next: none after one that was not expected at all."""
        expected = [] if self._is_lost else self._expected
        return (expected[place] for place in range(self._place, min(self._place + most, len(expected))))
