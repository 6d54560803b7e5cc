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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import MIB, print_rows
from benchmarks.limit import limited, limits
from benchmarks.limit.kinds import KINDS, NO_LIMIT
from benchmarks.limit.limited import Row
from benchmarks.limit.limited_process import ENVIRONMENT
from benchmarks.limit.workloads import WORKLOADS
from hf_memopt.units import GIB

ENVIRONMENTS = {"mapped": ENVIRONMENT, "default": {"OMP_WAIT_POLICY": "passive"}}
# Shares of the bytes that the steps of a plain run add to its memory at rest.
ALLOWANCE, BUDGET = 0.4, 0.25
NUM_STEPS = 4
# A run is too slow after so many times the time of the plain run without a limit.
TOO_SLOW = 4
# Kinds whose first run with the first allocator keeps its curve.
DRAWN = (NO_LIMIT, "plain", "ours, budget", "ours, all")
COSTS = ("cpu_s", "wall_s", "written_bytes")


class Bench:
    """The runs of one workload, all under the same limit."""

    def __init__(self, workload: str, options: argparse.Namespace, folder: Path) -> None:
        self._workload, self._options, self._folder = workload, options, folder
        self._processes = limited.Processes("training", folder, limit_kind=options.limit, too_slow=TOO_SLOW)
        self._facts: dict[str, Any] = {}
        self._step_s = 0.0
        self._undrawn = set(DRAWN)

    def run_all(self) -> Iterator[dict[str, Any]]:
        """Run every kind as often as wanted, and yield the results so far after each run."""
        cases = [(kind, allocator) for allocator in self._options.allocators for kind in self._options.kinds]
        for rows in limited.in_turns(cases, self._options.runs, self._run, summary):
            yield {**self._facts, "rows": rows}

    def _run(self, kind: str, allocator: str) -> Row:
        settings = {
            "workload": self._workload,
            "kind": kind,
            "is_toy": self._options.size == "toy",
            "folder": str(self._folder),
            "budget_gib": self._facts.get("budget_bytes", 0) / GIB,
        }
        name = f"{self._workload}, {kind}, {allocator}"
        limit_bytes = None if kind == NO_LIMIT else self._facts["limit_bytes"]
        run = self._processes.run(name, self._options.steps, settings, limit_bytes, ENVIRONMENTS[allocator])
        if not self._facts:
            facts = self._processes.limit_facts(run, ALLOWANCE)
            self._facts = {**facts, "budget_bytes": round(BUDGET * facts["added_bytes"])}
            self._step_s = run.results["wall_s"] / len(run.steps)
        row = limited.row_of(run, (*COSTS, "weights_digest", "stats"))
        if kind in self._undrawn and allocator == self._options.allocators[0]:
            self._undrawn.remove(kind)
            row["curve"] = limited.curve(run, self._step_s)
        return row


def summary(kind: str, allocator: str, runs: list[Row], reference: Row) -> Row:
    """Return the medians of a kind's runs, and whether all that finished ended with the reference's weights."""
    saved = [run["stats"].get("measured_peak_gib") for run in limited.finished(runs)]
    return {
        "kind": kind,
        "allocator": allocator,
        "reasons": sorted({run["reason"] for run in runs if run["reason"]}),
        "over_rest_bytes": limited.median(run["peak_bytes"] - run["rest_bytes"] for run in runs),
        "saved_gib": limited.median(peak_gib for peak_gib in saved if peak_gib is not None),
        "later_cpu_s": limited.median(_later_cpu_s(run["cpu_s_until"]) for run in limited.finished(runs)),
        "weights_equal": limited.are_equal(runs, reference, ["weights_digest"]),
        "losses_equal": limited.are_equal(runs, reference, ["losses"]),
        **limited.summary_of(runs, COSTS),
    }


def _later_cpu_s(until: list[float]) -> float:
    return until[-1] - until[len(until) // 2 - 1]


def print_report(results: dict[str, Any]) -> None:
    print(f"medians of {results['num_runs']} runs of {results['num_steps']} steps")
    for name, found in results["workloads"].items():
        rest, limit, budget = (found[key] / MIB for key in ("rest_bytes", "allowance_bytes", "budget_bytes"))
        print(f"\n{name}: {rest:.0f} MiB at rest, {limit:.0f} more allowed ({found['limit']}), budget {budget:.0f}")
        print_rows([_named_cells(row, results["num_steps"], found["rows"]) for row in found["rows"]])


def _named_cells(row: Row, num_steps: int, rows: list[Row]) -> dict[str, str]:
    cells = {
        "kind": row["kind"],
        "glibc": row["allocator"],
        **limited.common_cells(row),
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


def measure(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    facts = {
        "num_steps": options.steps,
        "allowance_share": ALLOWANCE,
        "budget_share": BUDGET,
        "environment": {name: ENVIRONMENTS[name] for name in options.allocators},
    }
    workloads: dict[str, Any] = {}
    for workload in options.workloads:
        for found in Bench(workload, options, folder).run_all():
            workloads[workload] = found
            yield {**facts, "workloads": workloads}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = limited.make_parser("under_a_limit", __doc__, KINDS, ("real", "toy"))
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: all")
    add("--allocators", nargs="+", choices=ENVIRONMENTS, default=["mapped"], help="settings of glibc (default: mapped)")
    add("--steps", type=int, default=NUM_STEPS, help="of each run (default: %(default)s)")
    add("--limit", choices=limits.KINDS, default="auto", help="a control group, RLIMIT_DATA, or the first if possible")
    limited.run_benchmark(parser.options(arguments), measure, print_report)


if __name__ == "__main__":
    main()
