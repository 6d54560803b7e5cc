"""The fastest settings with which a workload fits a card: all are simulated, a forecast says which to try next."""

import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tqdm import tqdm

from hf_memopt.planning.accounting.categories import ACTIVATION, INPUT, TEMPORARY
from hf_memopt.planning.cards.gpus import Card, allowances, find_card
from hf_memopt.planning.cards.memory_below import MemoryBelow, find_memory_below
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.estimate_report import Verdict, needed_bytes, verdict
from hf_memopt.planning.search.forecast import Forecast, speed_up
from hf_memopt.planning.search.table import FAILED, Impossible, Row, SettingsPlan, describe
from hf_memopt.planning.simulation.child_process import run_all_isolated
from hf_memopt.planning.workload import Lever, Settings, Workload
from hf_memopt.ranges import COUNT
from hf_memopt.units import format_gib

# Kinds of memory that grow with the samples of a forward pass.
_OF_SAMPLES = (ACTIVATION, TEMPORARY, INPUT)
# Combinations of several levers that are tried at most.
_MAX_EXPLORED = 12
# Of the plain run's time: values that take longer may do so in each pass.
_SLOW = 1.4
# Times that differ by less count as equal.
_SAME_TIME = 1.02
# Larger micro-batches are simulated where they may make an update faster by this factor.
_WORTH_SIMULATING = 1.03
# How much longer settings that surely fit may take than those that fit only just.
_NEARLY_SAME_TIME = 1.1
# Share of a card's memory that the chosen settings leave free if they can.
_TO_SPARE = 0.1
# Of the memory of a combination that is being simulated: one that differs by less would tell the same.
_SAME_MEMORY = 0.1
# Of a card's memory: a larger micro-batch that exceeds it by more, on a line through smaller ones, does not fit.
_TOO_MUCH = 1.05


class NothingFitsError(ValueError):
    """No settings fit; the message names the needed memory, and `smallest` is the candidate that needs least."""

    def __init__(self, message: str, smallest: Row) -> None:
        super().__init__(message)
        self.smallest = smallest


def plan(
    workload: Workload,
    *,
    gpu: str | Card,
    host: str | None = None,
    disk: str | None = None,
    link: str | None = None,
    reserve: str | None = None,
    num_workers: int | None = None,
    progress: bool = True,
) -> SettingsPlan:
    """Simulate a workload's settings on a card and rank them by predicted time.

    The plain run comes first, then each value of each lever alone, but for adaptive ones. From their differences a
    forecast says which combinations may fit and how long they take; the fastest of these are simulated, with the
    largest micro-batch that fits each and the next one unless that is far too large or saves no time, until no other
    is forecast to be faster. No figure in the answer is a forecast.

    Args:
        workload: the training step.
        gpu: a card's name, as in `CARDS`, or the size of its memory, such as "8GiB", for which times are relative.
        host: host memory that may be used, such as "32GiB", with or without its speed ("32GiB@40GBps"); None, any.
        disk: room for what the host has none for, and the disk's speed in each direction, such as "500GiB@5GBps";
            None, there is no disk.
        link: bandwidth between host and device, such as "12GBps"; None, the card's.
        reserve: device memory that other programs take, such as "1GiB" for a desktop; by default that of a `Card`,
            else 0.
        num_workers: simulations at once; None, one per core.
        progress: show a progress bar.

    Raises:
        ValueError: an argument is unreadable, or the card is smaller than the memory that it keeps for itself.
        NothingFitsError: with the smallest card that would do.

    Cost: seconds for each simulation: one for each value of a lever, and two or three for each of at most 12
    combinations.
    """
    COUNT.check("num_workers", num_workers)
    card = find_card(gpu, link=link, reserve=reserve)
    below = find_memory_below(host, disk, needs_no_host=any(each.of_disk for each in workload.levers))
    levers = tuple(each if below.disk else each.without_disk() for each in workload.levers)
    search = _Search(workload, levers, card, below)
    result = SettingsPlan(
        workload.name,
        levers,
        card,
        below.host_bytes,
        below.disk,
        tuple(_ranked(search.run(num_workers or os.cpu_count() or 1, progress), levers, card)),
        tuple(workload.micro_batches),
        search.impossible,
        workload.tokens_per_sample,
    )
    if not result.best.fits:
        raise _nothing_fits(result, below)
    return result


def _ranked(rows: list[Row], levers: Sequence[Lever], card: Card) -> list[Row]:
    """Sort rows by fit, then time, and put the chosen row first.

    Rows that fit with the error of estimates to spare are preferred to those that fit only just, unless they take 10 %
    longer. Of the rows within 2 % of the fastest one that leaves a tenth of the card free and gives up least is chosen.
    """
    rows = sorted(rows, key=lambda row: (not row.fits, row.update_ms))
    sure = [
        row for row in rows if row.verdict is Verdict.FITS and row.update_ms <= _NEARLY_SAME_TIME * rows[0].update_ms
    ]
    fastest, *_ = sure or rows
    as_fast = [
        row for row in sure or rows if row.fits is fastest.fits and row.update_ms <= _SAME_TIME * fastest.update_ms
    ]
    most_bytes = (1 - _TO_SPARE) * card.memory_bytes
    best = min(as_fast, key=lambda row: (row.needed_bytes > most_bytes, sum(_ranks(row.settings, levers))))
    return [best, *(row for row in rows if row is not best)]


# Rows, and settings that a workload cannot have.
_Attempted = tuple[list[Row], Impossible]
_Attempt = Callable[[], _Attempted]


class _Search:
    """The simulations of one plan; `impossible` are values that do not go together, and why."""

    def __init__(self, workload: Workload, levers: Sequence[Lever], card: Card, below: MemoryBelow) -> None:
        self._workload, self._levers, self._card, self._below = workload, levers, card, below
        kept_bytes = sum(allowances(card).values())
        if card.memory_bytes <= kept_bytes:
            raise ValueError(
                f"gpu={card.name!r}: {card.memory_bytes} bytes are no more than the {kept_bytes} that are "
                "kept for the device context and libraries; use a larger one"
            )
        self._micro_batches = workload.micro_batches
        self._plain: Settings = {lever.name: lever.values[0] for lever in levers}
        self._rows: list[Row] = []
        self._explored: list[Settings] = []
        self.impossible: dict[frozenset[tuple[str, Any]], str] = {}

    def run(self, num_workers: int, progress: bool) -> list[Row]:
        # All processes inherit the facts about its model.
        self._workload.simulated(self._plain, self._micro_batches[0])
        num_values = sum(len(lever.values) - 1 for lever in self._levers)
        most = 2 * num_values + 1 + _MAX_EXPLORED
        shown = "{desc}: {n_fmt} of at most {total_fmt} candidates [{elapsed}]"
        with tqdm(desc="Planning", total=most, bar_format=shown, disable=not progress) as bar:

            def simulate(attempts: Iterator[_Attempt]) -> None:
                for rows, failed in run_all_isolated(attempts, num_workers):
                    self._rows += rows
                    self.impossible |= failed
                    bar.update()

            self._explored.append(self._plain)
            simulate(iter([lambda: (self.explore(self._plain), {})]))
            if self._is_needless(self._plain):
                return self._rows
            simulate(self._alone())
            simulate(self._slow())
            num_explored = 0
            while num_explored < len(self._explored):  # the newest rows may make another promising
                num_explored = len(self._explored)
                simulate(self._promising())
            best = _ranked(self._rows, self._levers, self._card)[0]
            if best.fits and best.settings not in self._explored:  # of a value alone, to which no forecast has led
                simulate(iter([partial(self._attempt, best.settings)]))
        return self._rows

    def _alone(self) -> Iterator[_Attempt]:
        """Yield simulations of each value alone, with the smallest micro-batch, and of the plain run with the largest.

        The latter tells how much faster an update may be that has fewer passes.
        """
        smallest, largest = self._micro_batches[0], self._micro_batches[-1]
        has_others = any(len(lever.values) > 1 for lever in self._levers)
        if has_others and not any(row.micro_batch == largest for row in self._rows):
            yield lambda: ([self._simulate(self._plain, largest)], {})
        for lever in self._levers:
            for value in lever.values[1:]:
                if lever.adaptive.get(value) in lever.values:  # forecast from that one
                    continue
                alone = {**self._plain, lever.name: value}
                # Asked here, so that all processes inherit the libraries that it needs.
                if self._go_together(alone):
                    yield partial(self._attempt, alone, smallest)

    def _slow(self) -> Iterator[_Attempt]:
        """Yield simulations of the slow values with the largest micro-batch: fewer passes save the cost of each."""
        smallest, largest = self._micro_batches[0], self._micro_batches[-1]
        of_plain = next(row for row in self._rows if row.settings == self._plain and row.micro_batch == smallest)
        for row in list(self._rows):
            is_alone = row.settings != self._plain and row.micro_batch == smallest < largest
            if is_alone and row.update_ms > _SLOW * of_plain.update_ms:
                yield partial(self._attempt, row.settings, largest)

    def _promising(self) -> Iterator[_Attempt]:
        while len(self._explored) < _MAX_EXPLORED and (settings := self._next_settings()) is not None:
            if self._go_together(settings):
                self._explored.append(settings)
                yield partial(self._attempt, settings)

    def _go_together(self, settings: Settings) -> bool:
        """Return whether a workload can have settings; if not, the fewest of their values that it refuses are noted."""
        changed = self._changed(settings)
        reason = self._refusal(changed)
        if reason is None:
            return True
        for count in range(1, len(changed)):
            for part in map(dict, itertools.combinations(changed.items(), count)):
                if (of_part := self._refusal(part)) is not None:
                    self.impossible[frozenset(part.items())] = of_part
                    return False
        self.impossible[frozenset(changed.items())] = reason
        return False

    def _changed(self, settings: Settings) -> Settings:
        return {name: value for name, value in settings.items() if self._plain[name] != value}

    def _refusal(self, changed: Settings) -> str | None:
        try:
            self._workload.simulated({**self._plain, **changed}, self._micro_batches[0])
        except ValueError as error:
            return str(error)
        return None

    def _attempt(self, settings: Settings, micro_batch: int | None = None) -> _Attempted:
        """Return the row of a micro-batch, or those that `explore` finds; or the reason why there are none.

        Levers know nothing of each other. A library's error is a reason too, which the plan shows: it must not cost all
        other candidates.
        """
        try:
            return self.explore(settings) if micro_batch is None else [self._simulate(settings, micro_batch)], {}
        except Exception as error:
            reason = str(error) if isinstance(error, ValueError) else f"{FAILED}{type(error).__name__}: {error}"
            return [], {frozenset(self._changed(settings).items()): reason}

    def _next_settings(self) -> Settings | None:
        """Return the fastest combination that is forecast to fit, or None where none is clearly faster than the best.

        Of those that are nearly as fast it is the one with the least memory; of equals, the most frugal. Where nothing
        has fitted, and nothing is forecast to, it is the one that is forecast to need least. While others are being
        simulated it is one with clearly more or less memory than theirs.
        """
        forecast = Forecast(self._plain, self._rows, self._micro_batches, self._card.memory_bytes, self._levers)
        known = [row.settings for row in self._rows]
        unknown = [each for each in self._explored if each not in known and not self._is_excluded(each)]
        running = [forecast.of(settings).needed_bytes for settings in unknown]
        fitting = [row.update_ms for row in self._rows if row.fits]
        best_ms = min(fitting, default=float("inf"))
        candidates = [
            (forecast.of(settings), settings)
            for settings in _combinations(self._levers)
            if settings not in self._explored and not self._is_excluded(settings) and not self._is_needless(settings)
        ]
        candidates = [
            each
            for each in candidates
            if all(abs(each[0].needed_bytes - other) > _SAME_MEMORY * other for other in running)
        ]
        room = [each for each in candidates if self._has_room(each[0].needed_bytes, each[0].host_bytes)]
        faster = [each for each in room if _SAME_TIME * each[0].least_ms < best_ms]
        if faster:
            most_ms = _SAME_TIME * min(each[0].least_ms for each in faster)
            as_fast = [each for each in faster if each[0].least_ms <= most_ms]
            return min(reversed(as_fast), key=lambda each: each[0].needed_bytes)[1]
        if fitting or not candidates:
            return None
        on_host = [each for each in candidates if self._has_room(0, each[0].host_bytes)]
        return min(on_host or candidates, key=lambda each: each[0].needed_bytes)[1]

    def _has_room(self, needed: float, host_bytes: float) -> bool:
        return needed <= self._card.memory_bytes and self._below.holds(int(host_bytes))

    def _is_excluded(self, settings: Settings) -> bool:
        return any(values <= settings.items() for values in self.impossible)

    def explore(self, settings: Settings) -> list[Row]:
        """Simulate the largest micro-batch that fits, and the next one, while larger ones may save time."""
        known = {row.micro_batch: row for row in self._rows if row.settings == settings}
        rows: list[Row] = []
        # Positions: all up to `fitting` fit, all from `failing` on do not.
        fitting, failing = -1, len(self._micro_batches)
        last: Row | None = None
        while failing - fitting > 1 and not self._is_too_large(self._micro_batches[fitting + 1], [*known.values()]):
            if last is not None and last.fits and not self._may_save(last):
                break
            position = self._next(fitting, failing, last)
            micro_batch = self._micro_batches[position]
            last = known.get(micro_batch)
            if last is None:
                last = self._simulate(settings, micro_batch)
                rows.append(last)
                known[micro_batch] = last
            fitting, failing = (position, failing) if last.fits else (fitting, position)
        return rows

    def _is_too_large(self, micro_batch: int, rows: list[Row]) -> bool:
        """Return whether memory, which grows by samples, would be far too large by the two largest ones that fit."""
        fitting = sorted((row.micro_batch, row.needed_bytes) for row in rows if row.fits)
        if len(fitting) < 2:
            return False
        (few, of_few), (more, of_more) = fitting[-2:]
        expected = of_more + (of_more - of_few) / (more - few) * (micro_batch - more)
        return expected > _TOO_MUCH * self._card.memory_bytes

    def _may_save(self, row: Row) -> bool:
        """Return whether larger micro-batches may save more than 3 % of the time.

        With fewer passes they save at most what they save the plain run, and the waits for copies.
        """
        of_plain = sorted((other for other in self._rows if other.settings == self._plain), key=lambda o: o.micro_batch)
        if row.settings == self._plain or len(of_plain) < 2:
            return True
        saved_ms = row.update_ms * (1 - speed_up(of_plain, of_plain[0])) + row.stall_ms
        return _WORTH_SIMULATING * (row.update_ms - saved_ms) < row.update_ms

    def _next(self, fitting: int, failing: int, last: Row | None) -> int:
        """Choose the smallest, then the largest that should fit by the last one, or the middle if it was too large."""
        if last is None:
            return 0
        if not last.fits:
            return (fitting + failing) // 2
        per_sample = sum(last.estimate.breakdown.get(kind, 0) for kind in _OF_SAMPLES) / last.micro_batch
        room = self._card.memory_bytes - last.needed_bytes
        guess = bisect_right(self._micro_batches, last.micro_batch + room / max(1.0, per_sample)) - 1
        return min(max(guess, fitting + 1), failing - 1)

    def _is_needless(self, settings: Settings) -> bool:
        """Return whether a combination that spends no more in any respect fits, and no larger micro-batch is faster."""
        ranks = _ranks(settings, self._levers)
        return any(
            row.verdict is Verdict.FITS
            and (row.micro_batch == self._micro_batches[-1] or not self._may_save(row))
            and all(spent <= other for spent, other in zip(_ranks(row.settings, self._levers), ranks, strict=True))
            for row in self._rows
        )

    def _simulate(self, settings: Settings, micro_batch: int) -> Row:
        simulated = self._workload.simulated(settings, micro_batch)
        accumulation = self._workload.effective_batch // (micro_batch * simulated.num_gpus)
        estimate = simulate_step(simulated, gpu=replace(self._card, is_named=True), below=self._below)
        estimate = estimate.with_passes(accumulation / simulated.num_micro_batches)
        assert estimate.step_ms is not None
        assert estimate.stall_ms is not None
        holds = self._below.holds(estimate.host_bytes, estimate.disk_bytes)
        return Row(
            settings=settings,
            micro_batch=micro_batch,
            accumulation=accumulation,
            update_ms=estimate.step_ms,
            stall_ms=estimate.stall_ms - estimate.update_stall_ms,
            needed_bytes=needed_bytes(estimate, self._card),
            verdict=verdict(estimate, self._card) if holds else Verdict.NO,
            estimate=estimate if self._card.is_named else estimate.without_times(),
        )


def _ranks(settings: Settings, levers: Sequence[Lever]) -> list[int]:
    return [lever.values.index(settings[lever.name]) for lever in levers]


def _combinations(levers: Sequence[Lever]) -> Iterator[Settings]:
    for values in itertools.product(*(lever.values for lever in levers)):
        yield {lever.name: value for lever, value in zip(levers, values, strict=True)}


def _nothing_fits(result: SettingsPlan, below: MemoryBelow) -> NothingFitsError:
    holding = [row for row in result.rows if below.holds(row.estimate.host_bytes, row.estimate.disk_bytes)]
    smallest = min(holding or result.rows, key=lambda row: row.needed_bytes)
    estimate = smallest.estimate
    largest = next(iter(estimate.breakdown))
    notes = "".join(f". {note.removesuffix('.')}" for note in estimate.notes)
    return NothingFitsError(
        f"gpu={result.card.name!r}: no settings of {result.workload} fit. The smallest need "
        f"{format_gib(smallest.needed_bytes)} ({describe(smallest)}), and their peak is in {estimate.phase}, where "
        f"{largest} take {format_gib(estimate.breakdown[largest])}. Use a card of that size, or a smaller model, "
        f"or fewer trainable parameters (LoRA){notes}",
        smallest,
    )
