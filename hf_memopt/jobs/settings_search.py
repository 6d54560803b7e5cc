"""The cheapest settings with which a workload fits a card, every candidate simulated."""

import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tqdm import tqdm

from hf_memopt.estimate.accounting.categories import ACTIVATION, INPUT, TEMPORARY
from hf_memopt.estimate.estimate import simulate_step
from hf_memopt.estimate.estimate_report import fits, needed_bytes
from hf_memopt.estimate.gpus import Card, allowances, find_card, parse_size
from hf_memopt.estimate.memory_below import MemoryBelow, find_memory_below
from hf_memopt.estimate.simulation.child_process import run_all_isolated
from hf_memopt.jobs.settings_table import Row, SettingsPlan, describe
from hf_memopt.jobs.workload import Lever, Settings, Workload
from hf_memopt.ranges import COUNT
from hf_memopt.units import format_gib

# Kinds of memory that grow with the samples of a forward pass.
_OF_SAMPLES = (ACTIVATION, TEMPORARY, INPUT)


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
    num_workers: int | None = None,
    progress: bool = True,
) -> SettingsPlan:
    """Simulate a workload's settings on a card and rank them by predicted time.

    For every combination of levers the largest micro-batch that fits is sought, and it and the next one are simulated:
    the peak is convex in the micro-batch and cannot be extrapolated. Combinations that spend more than one which fits
    with the largest micro-batch of all are left out: they could only be slower.

    Args:
        workload: the training step.
        gpu: a card's name, as in `CARDS`, or the size of its memory, such as "8GiB".
        host: host memory that may be used, such as "32GiB"; None, any.
        disk: room for saved activations that the host has none for, and the disk's speed in each direction, such as
            "500GiB@5GBps"; None, they stay on the card. Frozen weights may stream from files on it.
        link: bandwidth between host and device, such as "12GBps"; None, the card's.
        num_workers: simulations at once; None, one per core.
        progress: show a progress bar.

    Raises:
        ValueError: an argument is unreadable, or the card is smaller than the memory that it keeps for itself.
        NothingFitsError: with the smallest card that would do.

    Cost: seconds for each simulation; a few for each combination of levers.
    """
    COUNT.check("num_workers", num_workers)
    link_bytes_per_s = None if link is None else parse_size(link, "link")
    card = find_card(gpu, link_bytes_per_s)
    below = find_memory_below(host, disk, reads_only=any("file" in each.values for each in workload.levers))
    levers = tuple(each if below.disk else each.without_disk() for each in workload.levers)
    search = _Search(workload, levers, card, below)
    num_workers = os.cpu_count() or 1 if num_workers is None else num_workers
    rows = sorted(search.run(num_workers, progress), key=lambda row: (not row.fits, row.update_ms))
    result = SettingsPlan(workload.name, levers, card, below.host_bytes, below.disk, tuple(rows))
    if not result.best.fits:
        raise _nothing_fits(result)
    return result


class _Search:
    def __init__(self, workload: Workload, levers: Sequence[Lever], card: Card, below: MemoryBelow) -> None:
        self._workload, self._levers, self._card, self._below = workload, levers, card, below
        kept_bytes = sum(allowances(card).values())
        if card.memory_bytes <= kept_bytes:
            raise ValueError(
                f"gpu={card.name!r}: {card.memory_bytes} bytes are no more than the {kept_bytes} that are "
                "kept for the device context and libraries; use a larger one"
            )
        self._micro_batches = workload.micro_batches
        self._rows: list[Row] = []

    def run(self, num_workers: int, progress: bool) -> list[Row]:
        combinations = list(_combinations(self._levers))
        # All processes inherit the facts about its model.
        self._workload.simulated(combinations[0], self._micro_batches[0])
        with tqdm(total=len(combinations), desc="Planning", unit="combination", disable=not progress) as bar:

            def explorations(chosen: Sequence[Settings]) -> Iterator[Callable[[], list[Row]]]:
                for settings in chosen:
                    if self._is_needless(settings):
                        bar.update()
                    else:
                        yield partial(self.explore, settings)

            # The plain run comes before the others: if it fits with the largest micro-batch, they are skipped.
            for part in (combinations[:1], combinations[1:]):
                for rows in run_all_isolated(explorations(part), num_workers):
                    self._rows += rows
                    bar.set_postfix(simulated=len(self._rows), refresh=False)
                    bar.update()
        return self._rows

    def explore(self, settings: Settings) -> list[Row]:
        rows: list[Row] = []
        # Positions: all up to `fitting` fit, all from `failing` on do not.
        fitting, failing = -1, len(self._micro_batches)
        while failing - fitting > 1:
            position = self._next(fitting, failing, rows)
            rows.append(self._simulate(settings, self._micro_batches[position]))
            fitting, failing = (position, failing) if rows[-1].fits else (fitting, position)
        return rows

    def _next(self, fitting: int, failing: int, rows: Sequence[Row]) -> int:
        """Choose the smallest, then the largest that should fit by the last one's need, or the middle if it was too
        large."""
        if not rows:
            return 0
        if not rows[-1].fits:
            return (fitting + failing) // 2
        last = rows[-1]
        per_sample = sum(last.estimate.breakdown.get(kind, 0) for kind in _OF_SAMPLES) / last.micro_batch
        room = self._card.memory_bytes - last.needed_bytes
        guess = bisect_right(self._micro_batches, last.micro_batch + room / max(1.0, per_sample)) - 1
        return min(max(guess, fitting + 1), failing - 1)

    def _is_needless(self, settings: Settings) -> bool:
        """Return whether a combination that spends no more in any respect fits with the largest micro-batch."""
        ranks = self._ranks(settings)
        return any(
            row.fits
            and row.micro_batch == self._micro_batches[-1]
            and all(spent <= other for spent, other in zip(self._ranks(row.settings), ranks, strict=True))
            for row in self._rows
        )

    def _ranks(self, settings: Settings) -> list[int]:
        return [lever.values.index(settings[lever.name]) for lever in self._levers]

    def _simulate(self, settings: Settings, micro_batch: int) -> Row:
        simulated = self._workload.simulated(settings, micro_batch)
        accumulation = self._workload.effective_batch // (micro_batch * simulated.num_gpus)
        estimate = simulate_step(simulated, gpu=self._card, below=self._below)
        estimate = estimate.with_passes(accumulation / simulated.num_micro_batches)
        assert estimate.step_ms is not None
        return Row(
            settings=settings,
            micro_batch=micro_batch,
            accumulation=accumulation,
            update_ms=estimate.step_ms,
            needed_bytes=needed_bytes(estimate, self._card),
            fits=self._below.holds(estimate.host_bytes) and fits(estimate, self._card),
            estimate=estimate,
        )


def _combinations(levers: Sequence[Lever]) -> Iterator[Settings]:
    """Yield those that spend least first."""
    ranks = itertools.product(*(range(len(lever.values)) for lever in levers))
    for chosen in sorted(ranks, key=lambda each: (sum(each), each)):
        yield {lever.name: lever.values[rank] for lever, rank in zip(levers, chosen, strict=True)}


def _nothing_fits(result: SettingsPlan) -> NothingFitsError:
    on_host = [row for row in result.rows if MemoryBelow(result.host_bytes).holds(row.estimate.host_bytes)]
    smallest = min(on_host or result.rows, key=lambda row: row.needed_bytes)
    estimate = smallest.estimate
    largest = next(iter(estimate.breakdown))
    return NothingFitsError(
        f"gpu={result.card.name!r}: no settings of {result.workload} fit. The smallest need "
        f"{format_gib(smallest.needed_bytes)} ({describe(smallest)}), and their peak is in {estimate.phase}, where "
        f"{largest} take {format_gib(estimate.breakdown[largest])}. Use a card of that size, or a smaller model, "
        "or fewer trainable parameters (LoRA)",
        smallest,
    )
