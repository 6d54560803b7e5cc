"""Full fine-tuning on a CPU, whose memory is mostly an optimizer's state: in memory, mapped by the system, and away.

    python -m benchmarks.limit.optimizer_state --folder FOLDER_ON_A_DISK

AdamW with clipping, accumulation and a schedule trains a Llama in float32. Each run is a process of its own, alone; the
kinds take turns, each without a limit and then under it. The limit is the plain run's memory with the model alone, and
a share of what its updates add without a limit. It is that of a control group where this process may make one, and
otherwise `RLIMIT_DATA`. In "mapped" the state is torch's own, in shared mappings of files that the system writes and
reads by itself: such pages count in a control group, and the system takes them back first. "ours, host" copies within
the memory of the host, which is for a GPU and frees nothing here. "SGD, no state" is the same run without any state.

"peak" is anonymous memory, sampled every few milliseconds; "for state", how much of it is over that of "SGD, no state"
without a limit. CPU time is that of all threads, in user space and in the system. Bytes read and written are the
system's count for the process, per update. "equal" are losses, weights and state, bit for bit. For all kinds, threads
that wait for each other sleep, and glibc gives larger blocks back when they are freed (`MALLOC_MMAP_THRESHOLD_`).
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import CPU, MIB, BenchmarkParser, environment, print_rows, results_path, write_results
from benchmarks.limit.frozen_base import ENVIRONMENT, TOO_SLOW, TOO_SLOW_S
from benchmarks.limit.full_training import KINDS, MAX_NORM, MICRO_BATCHES, NO_STATE, PLAIN
from hf_memopt.recipes.memory_limit import limits
from hf_memopt.recipes.memory_limit.limited_process import run_limited
from hf_memopt.transfer.scratch_file import file_system
from hf_memopt.units import GIB

NUM_STEPS = 3
# Share of the bytes that the updates of a plain run add to its memory with the model alone.
ALLOWANCE = 0.5
_REAL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10, "vocab_size": 8000}
_TOY = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 2000}
SIZES: dict[str, dict[str, Any]] = {
    "real": {"model": _REAL, "num_tokens": 128},
    "toy": {"model": _TOY, "num_tokens": 16},
}
COSTS = ("cpu_s", "wall_s", "read_bytes", "written_bytes")
DIGESTS = ("losses", "weights_digest", "state_digest")

Row = dict[str, Any]


class Bench:
    """The runs of all kinds, without a limit and under the same one."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._limit_bytes: int | None = None
        self._too_slow_s: float | None = None
        self._facts: dict[str, Any] = {}
        self._runs: dict[tuple[str, bool], list[Row]] = {}

    def run_all(self) -> Iterator[dict[str, Any]]:
        """Run every kind as often as wanted, and yield the results so far after each run."""
        for _ in range(self._options.runs):
            for is_limited in (False, True):
                for kind in self._options.kinds:
                    self._runs.setdefault((kind, is_limited), []).append(self._run(kind, is_limited))
                    reference = self._runs[PLAIN, False][0]
                    yield self._facts | {"rows": [summary(*each, runs, reference) for each, runs in self._runs.items()]}

    def _run(self, kind: str, is_limited: bool) -> Row:
        settings = {**SIZES[self._options.size], "kind": kind, "num_steps": NUM_STEPS, "folder": str(self._folder)}
        with limits.memory_limit() as limit:
            run = run_limited(
                [sys.executable, "-m", "benchmarks.limit.full_training", json.dumps(settings)],
                limit,
                self._limit_bytes if is_limited else None,
                log=self._folder / "process.log",
                environ=ENVIRONMENT,
                timeout_s=self._too_slow_s,
            )
            if self._limit_bytes is None:
                allowance = round(ALLOWANCE * (run.peak_bytes - run.rest.anonymous_bytes))
                self._limit_bytes = run.counted_rest(limit) + allowance
                self._too_slow_s = max(TOO_SLOW_S, TOO_SLOW * run.results["wall_s"])
                self._facts = {"limit": limit.name, "limit_bytes": self._limit_bytes}
        print(
            f"{kind}, {'limited' if is_limited else 'no limit'}: {run.end}, peak {run.peak_bytes / MIB:.0f} MiB",
            flush=True,
        )
        return {
            "end": run.end,
            "reason": run.reason,
            "losses": run.losses,
            "rest_bytes": run.rest.anonymous_bytes,
            "peak_bytes": run.peak_bytes,
            **{name: run.results.get(name) for name in (*COSTS, *DIGESTS[1:], "report")},
        }


def summary(kind: str, is_limited: bool, runs: list[Row], reference: Row) -> Row:
    """Return the medians of a kind's runs, and whether all that finished have the reference's results."""
    finished = [run for run in runs if run["end"] == "finished"]
    are_equal = all(run[name] == reference[name] for run in finished for name in DIGESTS)
    return {
        "kind": kind,
        "is_limited": is_limited,
        "ends": sorted({run["end"] for run in runs}),
        "num_steps": min(len(run["losses"]) for run in runs),
        "peak_bytes": statistics.median(run["peak_bytes"] for run in runs),
        **{name: statistics.median(run[name] for run in finished) if finished else None for name in COSTS},
        "are_equal": are_equal if finished and kind != NO_STATE else None,
        "runs": runs,
    }


def print_report(results: dict[str, Any]) -> None:
    limit = f"{results['limit_bytes'] / MIB:.0f} MiB ({results['limit']})"
    print(f"medians of {results['num_runs']} runs of {results['num_steps']} updates; the limit is {limit}")
    print_rows([_cells(row, results["rows"], results["num_steps"]) for row in results["rows"]])


def _cells(row: Row, rows: list[Row], num_steps: int) -> dict[str, str]:
    free = {each["kind"]: each for each in rows if not each["is_limited"]}
    cells = {
        "kind": row["kind"],
        "limit": "yes" if row["is_limited"] else "no",
        "end": " or ".join(row["ends"]) + ("" if row["cpu_s"] else f" in update {row['num_steps'] + 1}"),
        "peak MiB": f"{row['peak_bytes'] / MIB:.0f}",
    }
    if NO_STATE in free:
        cells["for state"] = f"{(row['peak_bytes'] - free[NO_STATE]['peak_bytes']) / MIB:.0f}"
    if row["cpu_s"] is None:
        return cells
    return cells | {
        "CPU s": f"{row['cpu_s'] / num_steps:.2f}",
        "of plain": f"{row['cpu_s'] / free[PLAIN]['cpu_s']:.2f}",
        "wall s": f"{row['wall_s'] / num_steps:.2f}",
        "GiB read": f"{row['read_bytes'] / num_steps / GIB:.2f}",
        "written": f"{row['written_bytes'] / num_steps / GIB:.2f}",
        "results": {None: "-", True: "equal", False: "DIFFER"}[row["are_equal"]],
    }


def run(options: argparse.Namespace, output: Path) -> dict[str, Any]:
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results: dict[str, Any] = {
            **environment(CPU),
            "benchmark": "limit.optimizer_state",
            "file_system": file_system(options.folder),
            "size": options.size,
            "sizes": SIZES[options.size] | {"micro_batches": MICRO_BATCHES, "max_norm": MAX_NORM},
            "num_runs": options.runs,
            "num_steps": NUM_STEPS,
            "allowance_share": ALLOWANCE,
            "environment": ENVIRONMENT,
        }
        for found in Bench(options, Path(folder)).run_all():
            results |= found
            write_results(results, output)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    add = parser.add_argument
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="besides the plain run (all)")
    add("--runs", type=int, default=3, help="of each kind (default: %(default)s)")
    add("--size", choices=SIZES, default="real", help="of the model (default: %(default)s)")
    add("--folder", type=Path, default=Path("outputs/optimizer_state"), help="on a local disk (default: %(default)s)")
    options = parser.options(arguments)
    options.kinds = [PLAIN, *(kind for kind in options.kinds if kind != PLAIN)]
    output = options.output or results_path("optimizer-state", CPU)
    print_report(run(options, output))
    print("wrote", output)


if __name__ == "__main__":
    main()
