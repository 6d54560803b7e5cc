"""A forecast of combinations of settings from those that were simulated: it only says which to try next."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_memopt.planning.search.table import MemoryProfile, Part, Row
from hf_memopt.planning.workload import Lever, Settings


@dataclass(frozen=True)
class Expected:
    """The forecast of a combination with the smallest micro-batch, but `least_ms` of an update with the fastest one."""

    needed_bytes: float
    host_bytes: float
    least_ms: float


class Forecast:
    """Puts together the changes of each value of a lever alone, from the combination nearest to the one in question.

    Savings in memory of one use are shares of it: a base that streams has less to save where its weights are
    quantised. All other changes add up. Both are seen at each time of a step, not at its peak, which may move. Once a
    combination is simulated, forecasts of those that go further begin from there. An adaptive value that was not
    simulated has the memory of the most frugal one that it may become, and the plain run's time.
    """

    def __init__(
        self,
        plain: Settings,
        rows: Sequence[Row],
        micro_batches: Sequence[int],
        card_bytes: int,
        levers: Sequence[Lever],
    ) -> None:
        self._plain, self._rows, self._card_bytes = plain, rows, card_bytes
        self._known = [row for row in rows if row.micro_batch == micro_batches[0]]
        self._second = [row for row in rows if row.micro_batch in micro_batches[1:2]]
        (self._first,) = (row for row in self._known if row.settings == plain)
        # How much faster an update may be with a larger micro-batch.
        self._speed_up = speed_up(rows, self._first)
        changed = [(row, [each for each in row.settings.items() if each not in plain.items()]) for row in self._known]
        self._alone = {changes[0]: row for row, changes in changed if len(changes) == 1}
        for name, value, frugal in ((lever.name, *each) for lever in levers for each in lever.adaptive.items()):
            if (name, value) not in self._alone and (name, frugal) in self._alone:
                row = self._alone[name, frugal]
                settings = {**row.settings, name: value}
                self._alone[name, value] = replace(row, settings=settings, update_ms=self._first.update_ms)
        self._in_all = _by_use(self._first.profile)
        self._shares = {each: self._shares_left(row) for each, row in self._alone.items()}

    def of(self, settings: Settings) -> Expected:
        near = max(
            (row for row in self._known if self._goes_less_far(row.settings, settings)),
            key=lambda row: _num_shared(row.settings, settings, self._plain),
        )
        held: dict[Part, dict[str, float]] = {part: dict(uses) for part, uses in near.profile.items()}
        beside, near_ms = self._figures(near)
        least_ms = near_ms
        for each in settings.items():
            name, before = each[0], near.settings[each[0]]
            if before != each[1]:
                new, old = self._alone.get(each, self._first), self._alone.get((name, before), self._first)
                _change(held, new.profile, old.profile, in_shares=before == self._plain[name])
                (new_beside, new_ms), (old_beside, old_ms) = self._figures(new), self._figures(old)
                beside, least_ms = beside + new_beside - old_beside, least_ms + new_ms - old_ms
        needed = max(sum(uses.values()) for uses in held.values()) + max(0.0, beside)
        if self._only_smallest_fits(near, needed):
            least_ms += near.update_ms - near_ms
        on_host = near.estimate.host_bytes + self._on_host(settings) - self._on_host(near.settings)
        return Expected(needed, on_host, least_ms)

    def _only_smallest_fits(self, near: Row, needed: float) -> bool:
        """Return whether the second micro-batch, too large nearby, is so with as much saved for each sample."""
        second = next((row for row in self._second if row.settings == near.settings), None)
        if second is None:
            return False
        change = needed - near.needed_bytes
        most_saved = change * second.micro_batch / near.micro_batch if change < 0 else change
        return second.needed_bytes + most_saved > self._card_bytes

    def _goes_less_far(self, known: Settings, wanted: Settings) -> bool:
        """Return whether the wanted combination uses each lever that a known one uses."""
        return all(known[name] == value or wanted[name] != value for name, value in self._plain.items())

    def _figures(self, row: Row) -> tuple[float, float]:
        """Return the memory that a card needs beside the allocated peak, and the least time."""
        larger = [other.update_ms for other in self._rows if other.settings == row.settings]
        return float(row.needed_bytes - row.estimate.peak_bytes), min([*larger, self._speed_up * row.update_ms])

    def _on_host(self, settings: Settings) -> float:
        """Return the host memory of values together: the device has less to give it where others leave less."""
        values = [each for each in settings.items() if each in self._alone]
        total = float(self._first.estimate.host_bytes)
        for each in values:
            given = {use: (1 - share) * self._in_all[use] for use, share in self._shares[each].items() if share < 1}
            others = [self._shares[other] for other in values if other != each]
            left = sum(
                num_bytes * math.prod(min(1.0, other[use]) for other in others) for use, num_bytes in given.items()
            )
            added = self._alone[each].estimate.host_bytes - self._first.estimate.host_bytes
            total += added * (left / sum(given.values()) if given else 1.0)
        return total

    def _shares_left(self, row: Row) -> dict[str, float]:
        """Return the share of each use's memory over a step that a value leaves."""
        left = _by_use(row.profile)
        return {use: left[use] / num_bytes for use, num_bytes in self._in_all.items() if num_bytes}


def speed_up(rows: Sequence[Row], first: Row) -> float:
    """Return the shortest update with the settings of `first` and any micro-batch, divided by that of `first`."""
    return min(row.update_ms for row in rows if row.settings == first.settings) / first.update_ms


def _by_use(profile: MemoryProfile) -> Counter[str]:
    total: Counter[str] = Counter()
    for uses in profile.values():
        total.update(uses)
    return total


def _change(held: dict[Part, dict[str, float]], new: MemoryProfile, old: MemoryProfile, *, in_shares: bool) -> None:
    for part in held.keys() | new.keys() | old.keys():
        uses = held.setdefault(part, {})
        after, before = new.get(part, {}), old.get(part, {})
        for use in after.keys() | before.keys():
            now, then = after.get(use, 0), before.get(use, 0)
            if in_shares and now < then:
                uses[use] = uses.get(use, 0) * now / then
            else:
                uses[use] = uses.get(use, 0) + now - then


def _num_shared(known: Settings, wanted: Settings, plain: Settings) -> tuple[int, int]:
    """Return how near a combination is: by the values that it shares, then by those unlike the plain run's."""
    shared = [name for name, value in wanted.items() if known[name] == value]
    return len(shared), sum(wanted[name] != plain[name] for name in shared)
