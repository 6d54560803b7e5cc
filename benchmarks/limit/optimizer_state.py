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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import MIB, print_rows
from benchmarks.limit import limited
from benchmarks.limit.full_training import KINDS, MAX_NORM, MICRO_BATCHES, NO_STATE
from benchmarks.limit.limited import Row
from benchmarks.limit.limited_process import ENVIRONMENT
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
# A run is ended after so many times the time of the first one, which has no limit.
TOO_SLOW = 5
COSTS = ("cpu_s", "wall_s", "read_bytes", "written_bytes")
DIGESTS = ("weights_digest", "state_digest")
MemoryCells = Callable[[Row, list[Row]], dict[str, str]]


def measure(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    processes = limited.Processes("full_training", folder, limit_kind="auto", too_slow=TOO_SLOW)
    size = SIZES[options.size]
    return measured(options, processes, size, {**size, "folder": str(folder)}, {"allowance_share": ALLOWANCE})


def measured(
    options: argparse.Namespace,
    processes: limited.Processes,
    size: dict[str, Any],
    settings: dict[str, Any],
    limit: dict[str, Any],
    drawn: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Run the kinds, each without a limit and under it; the first run finds the limit that `limit` does not give.

    The first run of each row whose kind is in `drawn` keeps its curve.
    """
    facts = {
        "sizes": size | {"micro_batches": MICRO_BATCHES, "max_norm": MAX_NORM},
        "num_steps": NUM_STEPS,
        "environment": ENVIRONMENT,
        **limit,
    }
    step_s: list[float] = []
    undrawn = {(kind, is_limited) for kind in drawn for is_limited in (False, True)}

    def run(kind: str, is_limited: bool) -> Row:
        name = f"{kind}, {'limited' if is_limited else 'no limit'}"
        its_settings = {**settings, "kind": kind, "num_steps": NUM_STEPS}
        found = processes.run(name, NUM_STEPS, its_settings, facts["limit_bytes"] if is_limited else None)
        if "limit_bytes" not in facts:
            facts.update(processes.limit_facts(found, ALLOWANCE))
        row = limited.row_of(found, (*COSTS, *DIGESTS, "report"))
        step_s.append(found.results.get("wall_s", 0.0) / NUM_STEPS)
        if (kind, is_limited) in undrawn:
            undrawn.remove((kind, is_limited))
            row["curve"] = limited.curve(found, step_s[0])
        return row

    cases = [(kind, is_limited) for is_limited in (False, True) for kind in options.kinds]
    for rows in limited.in_turns(cases, options.runs, run, summary):
        yield {**facts, "rows": rows}


def summary(kind: str, is_limited: bool, runs: list[Row], reference: Row) -> Row:
    """Return the medians of a kind's runs, and whether all that finished have the reference's results."""
    return {
        "kind": kind,
        "is_limited": is_limited,
        "are_equal": None if kind == NO_STATE else limited.are_equal(runs, reference, ("losses", *DIGESTS)),
        **limited.summary_of(runs, COSTS),
    }


def print_report(results: dict[str, Any], memory_cells: MemoryCells | None = None) -> None:
    """Print a table; the cells of a row about its memory are found from the row and those without a limit."""
    limit = f"{results['limit_bytes'] / MIB:.0f} MiB ({results['limit']})"
    print(f"medians of {results['num_runs']} runs of {results['num_steps']} updates; the limit is {limit}")
    free = [row for row in results["rows"] if not row["is_limited"]]
    print_rows([_cells(row, free, results["num_steps"], memory_cells or _for_state) for row in results["rows"]])


def _for_state(row: Row, free: list[Row]) -> dict[str, str]:
    without = [each["peak_bytes"] for each in free if each["kind"] == NO_STATE]
    return {"for state": f"{(row['peak_bytes'] - without[0]) / MIB:z.0f}"} if without else {}


def _cells(row: Row, free: list[Row], num_steps: int, memory_cells: MemoryCells) -> dict[str, str]:
    cells = {
        "kind": row["kind"],
        "limit": "yes" if row["is_limited"] else "no",
        **limited.common_cells(row, "update"),
        **memory_cells(row, free),
    }
    if row["cpu_s"] is None:
        return cells
    return cells | {
        "CPU s": f"{row['cpu_s'] / num_steps:.2f}",
        "of plain": f"{row['cpu_s'] / free[0]['cpu_s']:.2f}",
        "wall s": f"{row['wall_s'] / num_steps:.2f}",
        "GiB read": f"{row['read_bytes'] / num_steps / GIB:.2f}",
        "written": f"{row['written_bytes'] / num_steps / GIB:.2f}",
        "results": {None: "-", True: "equal", False: "DIFFER"}[row["are_equal"]],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = limited.make_parser("optimizer_state", __doc__, KINDS, SIZES)
    limited.run_benchmark(parser.options(arguments), measure, print_report)


if __name__ == "__main__":
    main()
