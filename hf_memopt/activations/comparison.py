"""How much longer passes that follow a plan take than plain ones.

Single passes differ by more than a plan may miss its limit, so the fastest of several are compared. Where a plain pass
costs no memory, as on a CPU, as many plain as planned passes are taken, in turn. Elsewhere there is one plain pass.
"""

# The numbers of planned passes after which they are compared. Two are enough to find plans that are far off.
_IN_TURN = (2, 8)
_WITH_ONE = (2,)


class Comparison:
    """Times of passes that follow one plan, beside those of plain passes.

    Args:
        takes_turns: whether each planned pass is followed by a plain one.

    Attributes:
        plain_s: seconds of the one plain pass, None where it was not timed. Not used where passes take turns.
    """

    def __init__(self, takes_turns: bool) -> None:
        self.plain_s: float | None = None
        self._takes_turns = takes_turns
        self._planned_s: list[float] = []
        self._in_turn_s: list[float] = []

    @property
    def wants_plain(self) -> bool:
        """Return whether it is a plain pass's turn."""
        return self._takes_turns and len(self._in_turn_s) < len(self._planned_s)

    def restart(self) -> None:
        """Begin with another plan."""
        self._planned_s.clear()
        self._in_turn_s.clear()

    def add_planned(self, elapsed_s: float) -> float | None:
        """Take the seconds of a pass that followed the plan.

        Returns:
            by which share planned passes take longer, if that has just been found out.
        """
        if len(self._planned_s) == (_IN_TURN if self._takes_turns else _WITH_ONE)[-1]:
            return None
        self._planned_s.append(elapsed_s)
        if self._takes_turns or self.plain_s is None or len(self._planned_s) not in _WITH_ONE:
            return None
        return min(self._planned_s) / self.plain_s - 1

    def add_plain(self, elapsed_s: float) -> float | None:
        """Take the seconds of the plain pass after a planned one.

        Returns:
            as `add_planned`.
        """
        self._in_turn_s.append(elapsed_s)
        return min(self._planned_s) / min(self._in_turn_s) - 1 if len(self._in_turn_s) in _IN_TURN else None

    def drop_planned(self) -> None:
        """Forget the last planned pass: the plain one after it was of another size."""
        self._planned_s.pop()
