"""Every GPU benchmark in one command, the worthiest measurements first, within the minutes that there are.

    python -m benchmarks.campaign --minutes 28 --output outputs/campaign

Each measurement (a cell) has a process of its own. Its seconds are predicted from a probe of the machine and from the
cells that ran before it; one that would take longer than is left is passed over, and smaller ones follow. Results are
written after each cell: DIR/campaign.json has everything, and DIR/<benchmark>.json what the benchmark itself would
write. `--resume DIR` goes on where another run stopped, on the same GPU, commit and versions; `--part K/N` runs one of
N parts of equal length. Cells whose packages are missing say which. What failed, and which targets were met, stands in
the tables; the exit status is 0. `--dry-run` runs everything at toy size, with or without a GPU, and fails if a cell
does.
"""

import argparse
import sys
import time
from pathlib import Path

import psutil
import torch

from benchmarks.campaign.cells import BENCHMARKS, all_cells
from benchmarks.campaign.costs import REFERENCES, Machine, cost_of
from benchmarks.campaign.record import Record, report_of
from benchmarks.cells import Cell, facts, found_by, preload
from benchmarks.common import current_device, print_table
from benchmarks.targets import Verdict, formatted
from hf_memopt.estimate.gpus import CARDS

SPARE = 3.0  # a cell may take so many times its predicted seconds, and
SPARE_S = 60.0  # these, before it is killed
PROBE = "campaign.probe"


class Campaign:
    """Measures cells in their order until the time is over."""

    def __init__(self, options: argparse.Namespace, cells: list[Cell]) -> None:
        self._begun = psutil.Process().create_time()  # imports take time, too
        self._options = options
        self._cells = cells
        self._record = Record.resumed(options.output, options.resume) if options.resume else Record(options.output)
        self._machine = REFERENCES[0]

    def run(self) -> Record:
        """Everything that there is time for."""
        self._record.continue_on(facts(self._options.output))
        self._probe()
        for cell in self._cells:
            if cell.title not in self._record.entries:
                self._measure(cell)
        return self._record

    def _left_s(self) -> float:
        return 60 * self._options.minutes - (time.time() - self._begun)

    def _probe(self) -> None:
        cell = Cell(PROBE, "facts", {"size": "toy" if self._options.dry_run else "real"})
        if cell.title not in self._record.entries:
            self._measure(cell)
        found = self._record.entries[cell.title]["found"]
        if "half_flops" in found and not self._options.dry_run:  # toys say nothing of a machine's speed
            self._machine = Machine.probed(self._record.facts["hardware"]["name"], found)

    def _measure(self, cell: Cell) -> None:
        predicted_s = cost_of(cell).seconds(self._machine) * self._record.slowness(cell.benchmark)
        left_s, begun = self._left_s(), time.perf_counter()
        reason = report_of(cell.benchmark).pointless(cell.settings, self._record.rows(cell.benchmark))
        if reason is None and predicted_s > left_s:
            reason = f"would take about {predicted_s:.0f} s, {max(left_s, 0):.0f} s are left"
        if reason is not None:
            found = {"error": f"not run: {reason}"}
        else:
            limit_s = min(left_s, SPARE * predicted_s + SPARE_S)
            found = found_by(cell, self._options.output, limit_s)
        self._record.add(cell, found, predicted_s, time.perf_counter() - begun)
        done = found.get("error", "done").splitlines()[0][:150]
        print(f"{time.time() - self._begun:6.0f} s  {cell.title}: {done}", flush=True)


def print_plan(cells: list[Cell]) -> None:
    """Seconds and bytes of all cells by benchmark, for machines that are not this one."""
    header = ["cells", "number", "page-locked GB", "peak GB", *(f"s, {m.name}" for m in REFERENCES)]
    rows = []
    for benchmark in dict.fromkeys(cell.benchmark for cell in cells):
        costs = [cost_of(cell) for cell in cells if cell.benchmark == benchmark]
        seconds = [sum(c.seconds(m) for c in costs if c.device_bytes < m.memory_bytes) for m in REFERENCES]
        pinned, peak = sum(c.pinned_bytes for c in costs) / 1e9, max(c.device_bytes for c in costs) / 1e9
        rows.append([benchmark, str(len(costs)), f"{pinned:.0f}", f"{peak:.0f}", *(f"{s:.0f}" for s in seconds)])
    print("By arithmetic, before anything is measured; cells that do not fit a card take none of its seconds:")
    print_table(header, rows)
    for machine in REFERENCES:
        fitting = [cost for cost in map(cost_of, cells) if cost.device_bytes < machine.memory_bytes]
        minutes = sum(cost.seconds(machine) for cost in fitting) / 60
        print(f"{machine.name}: {minutes:.0f} min in all, {len(cells) - len(fitting)} cells do not fit its memory")
    print(flush=True)


def print_record(record: Record) -> None:
    """Every benchmark's tables, every cell, every target."""
    for benchmark in record.benchmarks():
        print(f"\n== {benchmark}")
        report_of(benchmark).show(record.results(benchmark))
    print()
    rows = []
    for title, entry in record.entries.items():
        outcome = entry["found"].get("error", "done").splitlines()[0][:90]
        rows.append([title, f"{entry['predicted_s']:.0f}", f"{entry['seconds']:.0f}", outcome])
    print_table(["cell", "predicted s", "seconds", "outcome"], rows)
    print()
    verdicts = list(record.verdicts())
    if verdicts:
        print_table(["target", "found", "limit", "verdict"], [_verdict_row(*each) for each in verdicts])
    outcomes = [verdict.outcome for _, verdict in verdicts]
    counted = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("met", "missed", "not measured"))
    print(f"\n{len(record.entries)} cells; targets: {counted}")


def _verdict_row(benchmark: str, verdict: Verdict) -> list[str]:
    found = formatted(verdict.value, "{:.3g}")
    return [f"{benchmark}: {verdict.what}", found, f"{verdict.target:g}", verdict.outcome]


def part_of(cells: list[Cell], part: tuple[int, int]) -> list[Cell]:
    """The cells whose beginning lies in the K-th of N parts of equal seconds."""
    number, count = part
    seconds = [cost_of(cell).seconds(REFERENCES[0]) for cell in cells]
    begins = [sum(seconds[:index]) * count / sum(seconds) for index in range(len(cells))]
    return [cell for cell, begin in zip(cells, begins, strict=True) if number - 1 <= begin < number]


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N, such as 2/3")
    return int(number), int(count)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=28.0, help="of the whole run (default: %(default)s)")
    add("--output", type=Path, default=Path("outputs/campaign"), help="folder of results (default: %(default)s)")
    add("--resume", type=Path, metavar="DIR", help="take over what the campaign in this folder has finished")
    add("--part", type=_part, default=(1, 1), metavar="K/N", help="run the K-th of N parts")
    add(
        "--card",
        choices=CARDS,
        help="what estimates are for (default: the GPU that runs; h100 for --list and --dry-run)",
    )
    add("--estimates", type=Path, help="file of planning.estimate --estimate-only, so that only measuring takes time")
    add("--dry-run", action="store_true", help="everything at toy size")
    add("--list", action="store_true", help="print the cells and their cost, and end")
    options = parser.parse_args(arguments)
    if options.card is None and (options.list or options.dry_run):
        options.card = "h100"
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device = current_device()
    if device.type == "cpu" and not (options.dry_run or options.list):
        print(
            "There is no GPU here: --dry-run runs everything at toy size, --list prints what would run", file=sys.stderr
        )
        return 2
    if not options.list:
        preload(PROBE, *BENCHMARKS)  # which imports them while this process does
    defaults = torch.device("cuda", 0) if options.list and not options.dry_run else device
    cells = all_cells(defaults, toy=options.dry_run, card=options.card, estimates=options.estimates)
    cells = part_of(cells, options.part)
    print_plan(cells)
    if options.list:
        rows = [[cell.title, *(f"{cost_of(cell).seconds(m):.0f}" for m in REFERENCES)] for cell in cells]
        print_table(["cell", *(f"s, {machine.name}" for machine in REFERENCES)], rows)
        return 0
    try:
        record = Campaign(options, cells).run()
        print_record(record)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if options.dry_run and record.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
