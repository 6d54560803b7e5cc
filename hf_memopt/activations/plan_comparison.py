"""Slowdown of passes that follow a plan against plain ones.

Single passes differ by more than a plan may miss its limit, so the fastest of several are compared. Where a plain pass
costs no memory, as on a CPU, planned and plain passes take turns. Elsewhere there is one plain pass.
"""

# How far a plan may miss `max_slowdown`, by the number of planned passes compared: the fewer, the more.
_IN_TURN = {1: 0.1, 2: 0.05, 8: 0.0}
_WITH_ONE = {2: 0.01}


class Comparison:
    """Times of passes that follow one plan, beside those of plain passes: `plain_s` where these do not take turns."""

    def __init__(self, max_slowdown: float, takes_turns: bool) -> None:
        self.plain_s: float | None = None
        self._max_slowdown, self._takes_turns = max_slowdown, takes_turns
        self._may_miss = _IN_TURN if takes_turns else _WITH_ONE
        self._planned_s: list[float] = []
        self._in_turn_s: list[float] = []

    @property
    def wants_plain(self) -> bool:
        return self._takes_turns and len(self._in_turn_s) < len(self._planned_s)

    def restart(self) -> None:
        self._planned_s.clear()
        self._in_turn_s.clear()

    def add_planned(self, elapsed_s: float) -> float | None:
        """Take the seconds of a planned pass; returns the slowdown, if it has just turned out to be too much."""
        if len(self._planned_s) == max(self._may_miss):
            return None
        self._planned_s.append(elapsed_s)
        return None if self._takes_turns or self.plain_s is None else self._excessive(self.plain_s)

    def add_plain(self, elapsed_s: float) -> float | None:
        self._in_turn_s.append(elapsed_s)
        return self._excessive(min(self._in_turn_s))

    def drop_planned(self) -> None:
        """Forget the last planned pass: the plain one after it was of another size."""
        self._planned_s.pop()

    def _excessive(self, plain_s: float) -> float | None:
        slowdown = min(self._planned_s) / plain_s - 1
        may_miss = self._may_miss.get(len(self._planned_s))
        return slowdown if may_miss is not None and slowdown > self._max_slowdown + may_miss else None
