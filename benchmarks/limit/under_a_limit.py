"""Training under a real memory limit on a CPU: plain, with rivals' means, and with saved activations on a disk.

    python -m benchmarks.limit.under_a_limit --folder FOLDER_ON_A_DISK

Each run is a process of its own, alone: the kinds take turns. A run makes its model, its data and one step of a small
batch; then the limit applies and the steps begin. The limit, the same figure for all kinds, is the plain run's memory
at rest plus a share of what its steps add without a limit. It is that of a control group, which ends the process, where
this process may make one, and otherwise `RLIMIT_DATA`, at which allocations fail.

Memory is anonymous memory, sampled every few milliseconds. "saved" is the part that saved activations hold, as the
offloader counts it; a budget is for that part alone. glibc keeps freed blocks below a threshold that grows by itself:
"mapped" fixes it at 64 KiB (`MALLOC_MMAP_THRESHOLD_`), so that every larger block is given back when it is freed, at
the cost of page faults; "default" leaves it alone. CPU time, after the set-up, is that of all threads, in user space
and in the system; "later" compares that of the second half of the steps, after plans have been made. Threads that wait
for each other sleep (`OMP_WAIT_POLICY`), so that other processes disturb it little. Bytes written are those that the
process caused to be sent to the disk.
"""

import argparse
import bisect
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import CPU, MIB, BenchmarkParser, environment, print_rows, results_path, write_results
from benchmarks.limit.kinds import KINDS, NO_LIMIT
from benchmarks.limit.workloads import WORKLOADS
from hf_memopt.recipes.memory_limit import limits
from hf_memopt.recipes.memory_limit.limited_process import LimitedRun, run_limited
from hf_memopt.transfer.scratch_file import file_system

ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
ALLOCATORS: dict[str, dict[str, str]] = {"mapped": {"MALLOC_MMAP_THRESHOLD_": str(2**16)}, "default": {}}
# Shares of the bytes that the steps of a plain run add to its memory at rest.
ALLOWANCE, BUDGET = 0.4, 0.25
NUM_STEPS = 4
POINTS_PER_STEP = 40
# A run is too slow, and is ended, after so many times the time of the plain run without a limit, at least so many
# seconds.
TOO_SLOW, TOO_SLOW_S = 4, 60.0
# Kinds whose first run with the first allocator keeps its curve.
DRAWN = (NO_LIMIT, "plain", "ours, budget", "ours, all")

Row = dict[str, Any]


class Bench:
    """The runs of one workload, all under the same limit."""

    def __init__(self, workload: str, options: argparse.Namespace, folder: Path) -> None:
        self._workload, self._options, self._folder = workload, options, folder
        self._budget_gib = self._step_s = 0.0
        self._limit_bytes: int | None = None
        self._runs: dict[tuple[str, str], list[Row]] = {}
        self._facts: dict[str, Any] = {}

    def run_all(self) -> Iterator[dict[str, Any]]:
        """Run every kind as often as wanted, and yield the results so far after each run."""
        for _ in range(self._options.runs):
            for allocator in self._options.allocators:
                for kind in self._options.kinds:
                    self._run(kind, allocator)
                    yield self.results()

    def _run(self, kind: str, allocator: str) -> None:
        print(f"{self._workload}, {kind}, {allocator}: ", end="", flush=True)
        settings = {
            "workload": self._workload,
            "kind": kind,
            "is_toy": self._options.size == "toy",
            "num_steps": self._options.steps,
            "folder": str(self._folder),
            "budget_gib": self._budget_gib,
        }
        with limits.memory_limit(self._options.limit) as limit:
            found = run_limited(
                [sys.executable, "-m", "benchmarks.limit.training", json.dumps(settings)],
                limit,
                None if kind == NO_LIMIT else self._limit_bytes,
                log=self._folder / "process.log",
                environ={**ENVIRONMENT, **ALLOCATORS[allocator]},
                timeout_s=max(TOO_SLOW_S, TOO_SLOW * self._options.steps * self._step_s) if self._step_s else None,
                show=lambda event: print("." if event["event"] == "step" else "", end="", flush=True),
            )
            if self._limit_bytes is None:
                self._set_limit(found, limit)
        runs = self._runs.setdefault((kind, allocator), [])
        is_drawn = not runs and kind in DRAWN and allocator == self._options.allocators[0]
        runs.append(row_of(found, self._step_s if is_drawn else None))
        print(f" {found.end}, peak {found.peak_bytes / MIB:.0f} MiB", flush=True)

    def _set_limit(self, reference: LimitedRun, limit: limits.MemoryLimit) -> None:
        self._step_s = reference.results["wall_s"] / len(reference.steps)
        added = reference.peak_bytes - reference.rest.anonymous_bytes
        allowance = round(ALLOWANCE * added)
        self._limit_bytes = reference.counted_rest(limit) + allowance
        self._budget_gib = BUDGET * added / 2**30
        self._facts = {
            "limit": limit.name,
            "rest_bytes": reference.rest.anonymous_bytes,
            "added_bytes": added,
            "allowance_bytes": allowance,
            "limit_bytes": self._limit_bytes,
            "budget_bytes": round(BUDGET * added),
        }

    def results(self) -> dict[str, Any]:
        reference = next(iter(self._runs.values()))[0]
        rows = [summary(kind, allocator, runs, reference) for (kind, allocator), runs in self._runs.items()]
        return {**self._facts, "rows": rows}


def row_of(run: LimitedRun, step_s: float | None) -> Row:
    """Return the figures of one run; with `step_s`, its curve too."""
    last_began_s = run.steps[-2]["at_s"] if len(run.steps) > 1 else run.rest.at_s
    last_peak = max(sample.anonymous_bytes for sample in run.samples if sample.at_s >= last_began_s)
    return {
        "end": run.end,
        "reason": run.reason,
        "losses": run.losses,
        "cpu_s_until": [step["cpu_s"] for step in run.steps],
        "rest_bytes": run.rest.anonymous_bytes,
        "peak_bytes": run.peak_bytes,
        "peak_of_last_step_bytes": last_peak,
        **{name: run.results.get(name) for name in ("cpu_s", "wall_s", "written_bytes", "weights_digest", "stats")},
        **({"curve": curve(run, step_s)} if step_s is not None else {}),
    }


def curve(run: LimitedRun, step_s: float) -> list[list[float]]:
    """Return `[steps, MiB]` of the highest sample in each of `POINTS_PER_STEP` stretches of each step.

    The step in which a run has ended by force counts as if it had taken `step_s`.
    """
    ends = [run.rest.at_s, *(step["at_s"] for step in run.steps)]
    ends += [ends[-1] + step_s, float("inf")]
    highest: dict[int, list[float]] = {}
    for sample in run.samples:
        number = max(0, bisect.bisect(ends, sample.at_s) - 1)
        place = number + (sample.at_s - ends[number]) / (ends[number + 1] - ends[number])
        point = [round(place, 3), round(sample.anonymous_bytes / MIB, 1)]
        stretch = int(POINTS_PER_STEP * place)
        highest[stretch] = max(highest.get(stretch, point), point, key=lambda each: each[1])
    return list(highest.values())


def summary(kind: str, allocator: str, runs: list[Row], reference: Row) -> Row:
    """Return the medians of a kind's runs, and whether all that finished ended with the reference's weights."""
    finished = [run for run in runs if run["end"] == "finished"]
    costs = ("cpu_s", "wall_s", "written_bytes")
    later = [run["cpu_s_until"][-1] - run["cpu_s_until"][len(run["losses"]) // 2 - 1] for run in finished]
    counted = [run["stats"].get("measured_peak_gib") for run in finished]
    saved = [peak_gib for peak_gib in counted if peak_gib is not None]
    return {
        "kind": kind,
        "allocator": allocator,
        "ends": [run["end"] for run in runs],
        "reasons": sorted({run["reason"] for run in runs if run["reason"]}),
        "num_steps": min(len(run["losses"]) for run in runs),
        "peak_bytes": statistics.median(run["peak_bytes"] for run in runs),
        "over_rest_bytes": statistics.median(run["peak_bytes"] - run["rest_bytes"] for run in runs),
        **{name: statistics.median(run[name] for run in finished) if finished else None for name in costs},
        "saved_gib": statistics.median(saved) if saved else None,
        "later_cpu_s": statistics.median(later) if finished else None,
        "weights_equal": all(run["weights_digest"] == reference["weights_digest"] for run in finished)
        if finished
        else None,
        "losses_equal": all(run["losses"] == reference["losses"] for run in finished) if finished else None,
        "runs": runs,
    }


def print_report(results: dict[str, Any]) -> None:
    print(f"medians of {results['num_runs']} runs of {results['num_steps']} steps")
    for name, found in results["workloads"].items():
        rest, limit, budget = (found[key] / MIB for key in ("rest_bytes", "allowance_bytes", "budget_bytes"))
        print(f"\n{name}: {rest:.0f} MiB at rest, {limit:.0f} more allowed ({found['limit']}), budget {budget:.0f}")
        print_rows([_named_cells(row, results["num_steps"], found["rows"]) for row in found["rows"]])


def _named_cells(row: Row, num_steps: int, rows: list[Row]) -> dict[str, str]:
    ends = sorted(set(row["ends"]))
    end = " or ".join(ends) if ends == ["finished"] else f"{' or '.join(ends)} in step {row['num_steps'] + 1}"
    cells = {
        "kind": row["kind"],
        "glibc": row["allocator"],
        "end": end,
        "peak MiB": f"{row['peak_bytes'] / MIB:.0f}",
        "over rest": f"{row['over_rest_bytes'] / MIB:.0f}",
        "saved": "-" if row["saved_gib"] is None else f"{1024 * row['saved_gib']:.0f}",
    }
    if row["cpu_s"] is None:
        return cells
    plain = next(each for each in rows if each["kind"] == NO_LIMIT and each["allocator"] == row["allocator"])
    return cells | {
        "CPU s / step": f"{row['cpu_s'] / num_steps:.2f}",
        "of plain": f"{row['cpu_s'] / plain['cpu_s']:.2f}",
        "later": f"{row['later_cpu_s'] / plain['later_cpu_s']:.2f}",
        "s / step": f"{row['wall_s'] / num_steps:.2f}",
        "GiB / step": f"{row['written_bytes'] / num_steps / 2**30:.2f}",
        "weights": "equal" if row["weights_equal"] else "DIFFER",
    }


def run(options: argparse.Namespace, output: Path) -> dict[str, Any]:
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results: dict[str, Any] = {
            **environment(CPU),
            "benchmark": "limit.under_a_limit",
            "file_system": file_system(options.folder),
            "size": options.size,
            "num_runs": options.runs,
            "num_steps": options.steps,
            "allowance_share": ALLOWANCE,
            "budget_share": BUDGET,
            "environment": {name: {**ENVIRONMENT, **ALLOCATORS[name]} for name in options.allocators},
            "workloads": {},
        }
        for workload in options.workloads:
            for found in Bench(workload, options, Path(folder)).run_all():
                results["workloads"][workload] = found
                write_results(results, output)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: all")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="besides the plain run without a limit (all)")
    add("--allocators", nargs="+", choices=ALLOCATORS, default=["mapped"], help="settings of glibc (default: mapped)")
    add("--runs", type=int, default=3, help="of each kind (default: %(default)s)")
    add("--steps", type=int, default=NUM_STEPS, help="of each run (default: %(default)s)")
    add("--limit", choices=limits.KINDS, default="auto", help="a control group, RLIMIT_DATA, or the first if possible")
    add("--size", choices=("real", "toy"), default="real", help="of the workloads (default: %(default)s)")
    add("--folder", type=Path, default=Path("outputs/under_a_limit"), help="on a local disk (default: %(default)s)")
    options = parser.options(arguments)
    options.kinds = [NO_LIMIT, *(kind for kind in options.kinds if kind != NO_LIMIT)]
    output = options.output or results_path("under-a-limit", CPU)
    print_report(run(options, output))
    print("wrote", output)


if __name__ == "__main__":
    main()
