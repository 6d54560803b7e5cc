"""Runs under a memory limit, one process at a time: their order, medians, options and results."""

import argparse
import bisect
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import CPU, MIB, BenchmarkParser, environment, highest_points, results_path, slug, write_results
from benchmarks.limit import limits
from benchmarks.limit.limited_process import ENVIRONMENT, LimitedRun, run_limited
from hf_memopt.transfer.scratch_file import file_system

TOO_SLOW_S = 60.0
POINTS_PER_STEP = 40

Row = dict[str, Any]


class Processes:
    """Processes that train by `benchmarks.limit.MODULE`, of which the first has no limit.

    A later one is ended after `too_slow` times the time of the first, and after `TOO_SLOW_S` at least.
    """

    def __init__(self, module: str, folder: Path, *, limit_kind: str, too_slow: int) -> None:
        self._module, self._log = module, folder / "process.log"
        self._limit_kind, self._too_slow = limit_kind, too_slow
        self._timeout_s: float | None = None

    def run(
        self,
        name: str,
        num_steps: int,
        settings: dict[str, Any],
        limit_bytes: int | None,
        environ: Mapping[str, str] = ENVIRONMENT,
    ) -> LimitedRun:
        print(f"{name}: ", end="", flush=True)
        with limits.memory_limit(self._limit_kind) as self._limit:
            run = run_limited(
                [sys.executable, "-m", "benchmarks.limit.process", self._module, str(num_steps), json.dumps(settings)],
                self._limit,
                limit_bytes,
                log=self._log,
                environ=environ,
                timeout_s=self._timeout_s,
                show=lambda event: print("." if event["event"] == "step" else "", end="", flush=True),
            )
        if self._timeout_s is None:
            self._timeout_s = max(TOO_SLOW_S, self._too_slow * run.results["wall_s"])
        print(f" {run.end}, peak {run.peak_bytes / MIB:.0f} MiB", flush=True)
        return run

    def limit_facts(self, run: LimitedRun, share: float) -> dict[str, Any]:
        """Return the limit that allows a share of the bytes that the steps of the last run have added to its rest."""
        added = run.peak_bytes - run.rest.anonymous_bytes
        allowance = round(share * added)
        return {
            "limit": self._limit.name,
            "rest_bytes": run.rest.anonymous_bytes,
            "added_bytes": added,
            "allowance_bytes": allowance,
            "limit_bytes": run.counted_rest(self._limit) + allowance,
        }


def drop_cached(base: Path) -> None:
    """Drop a folder's files from the system's cache."""
    for path in base.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_turns(
    cases: Sequence[tuple[Any, ...]], num_runs: int, run: Callable[..., Row], summary: Callable[..., Row]
) -> Iterator[list[Row]]:
    """Run every case as often as wanted, and yield the summaries so far after each run; the first is the reference."""
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for _ in range(num_runs):
        for case in cases:
            runs.setdefault(case, []).append(run(*case))
            yield [summary(*each, found, runs[cases[0]][0]) for each, found in runs.items()]


def row_of(run: LimitedRun, results: Iterable[str]) -> Row:
    """Return the figures of one run, and these of its results."""
    return {
        "end": run.end,
        "reason": run.reason,
        "losses": run.losses,
        "cpu_s_until": [step["cpu_s"] for step in run.steps],
        "rest_bytes": run.rest.anonymous_bytes,
        "peak_bytes": run.peak_bytes,
        **{name: run.results.get(name) for name in results},
    }


def curve(run: LimitedRun, step_s: float) -> list[list[float]]:
    """Return `[steps, MiB]` of the highest sample in each of `POINTS_PER_STEP` stretches of each step.

    The step in which a run has ended by force counts as if it had taken `step_s`.
    """
    ends = [run.rest.at_s, *(step["at_s"] for step in run.steps)]
    ends += [ends[-1] + step_s, float("inf")]
    points = []
    for sample in run.samples:
        number = max(0, bisect.bisect(ends, sample.at_s) - 1)
        place = number + (sample.at_s - ends[number]) / (ends[number + 1] - ends[number])
        points.append((place, sample.anonymous_bytes / MIB))
    return [[round(place, 3), round(mib, 1)] for place, mib in highest_points(points, POINTS_PER_STEP)]


def finished(runs: Sequence[Row]) -> list[Row]:
    return [run for run in runs if run["end"] == "finished"]


def summary_of(runs: Sequence[Row], costs: Iterable[str]) -> Row:
    """Return how runs of one kind ended, and medians of their peaks, and of costs of those that finished."""
    return {
        "ends": [run["end"] for run in runs],
        "num_steps": min(len(run["losses"]) for run in runs),
        "peak_bytes": statistics.median(run["peak_bytes"] for run in runs),
        **{name: median(run[name] for run in finished(runs)) for name in costs},
        "runs": runs,
    }


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def are_equal(runs: Sequence[Row], reference: Row, names: Iterable[str]) -> bool | None:
    """Compare results of all finished runs, by name, with those of the reference; None if no run finished."""
    equal = [run[name] == reference[name] for run in finished(runs) for name in names]
    return all(equal) if equal else None


def common_cells(row: Row, step: str = "step") -> dict[str, str]:
    """Return how a kind's runs ended, the shortest of them in which step, and their peak."""
    ends = sorted(set(row["ends"]))
    place = "" if ends == ["finished"] else f" in {step} {row['num_steps'] + 1}"
    return {"end": " or ".join(ends) + place, "peak MiB": f"{row['peak_bytes'] / MIB:.0f}"}


def make_parser(name: str, description: str | None, kinds: Iterable[str], sizes: Iterable[str]) -> BenchmarkParser:
    """Make a parser with the options of all these benchmarks; the first of the kinds is the reference."""
    parser = BenchmarkParser(description)
    first, *others = kinds
    add = parser.add_argument
    add("--kinds", nargs="+", choices=[first, *others], default=others, help=f"besides {first!r} (default: all)")
    add("--runs", type=int, default=3, help="of each kind (default: %(default)s)")
    add("--size", choices=sizes, default="real", help="of the trainings (default: %(default)s)")
    add("--folder", type=Path, default=Path("outputs", name), help="on a local disk (default: %(default)s)")
    parser.set_defaults(name=name, reference=first)
    return parser


def run_benchmark(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Path], Iterator[dict[str, Any]]],
    print_report: Callable[[dict[str, Any]], None],
) -> None:
    """Store the results after each run, and print them at the end; runs have a folder for their files."""
    options.kinds = list(dict.fromkeys([options.reference, *options.kinds]))
    output = options.output or results_path(slug(options.name), CPU)
    options.folder.mkdir(parents=True, exist_ok=True)
    results = {
        **environment(CPU),
        "benchmark": f"limit.{options.name}",
        "file_system": file_system(options.folder),
        "size": options.size,
        "num_runs": options.runs,
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for found in measure(options, Path(folder)):
            results |= found
            write_results(results, output)
    print_report(results)
    print("wrote", output)
