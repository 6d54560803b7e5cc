"""Training scripts that die at a memory limit, and the same scripts under `hf-memopt fit` below it.

    python -m benchmarks.limit.fit_table --folder FOLDER_ON_A_DISK

Each script of `fit_programs` runs without a limit, which shows what its training adds to the memory at rest, that of
the process with its libraries imported. Then a share of it is allowed: plain, and with `hf-memopt fit --memory`. A
control group enforces that limit, with 5 % and 20 MiB on top, from the start of the process on. Where `fit` stops and
names a memory that would do, it runs again with that; where the system kills it first, a run without the control group
has to name it. "CPU" is the CPU time after the imports over that of the plain
run. Linux, with the right to make control groups.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import CPU, MIB, BenchmarkParser, environment, print_rows, results_path, write_results
from benchmarks.limit.fit_programs import PROGRAMS
from benchmarks.limit.limits import memory_limit
from benchmarks.limit.watched import COMMAND_BYTES, limit_in_force, watch
from hf_memopt.units import parse_size

SHARES = (0.8, 0.5, 0.35)

Row = dict[str, Any]


def run(words: Sequence[str], log: Path, limit_bytes: int | None) -> Row:
    """Run a command of Python, and return its end, its peak, and what the script printed."""
    with memory_limit("group") as limit:
        found = watch([sys.executable, *words], log, limit, limit_bytes)
    named = re.findall(r"give it --memory (\w+)", found.text)
    printed = {name: value for line in found.lines for name, value in line.items() if name != "at_s"}
    return {
        "end": found.end,
        "status": found.status,
        "peak_bytes": found.peak_bytes,
        "wall_s": found.wall_s,
        "named_bytes": parse_size(named[-1]) if named and found.end != "finished" else None,
        "num_starts": len(found.printed("rest_bytes")),
        **printed,
    }


def fitted(program: Sequence[str], limit_bytes: float, folder: Path, log: Path, *, is_enforced: bool = True) -> Row:
    memory = f"{limit_bytes / MIB:.0f}MiB"
    words = ["-m", "hf_memopt.cli", "fit", "--memory", memory, "--disk", str(folder), "--", *program]
    return {"memory": memory, **run(words, log, limit_in_force(limit_bytes) + COMMAND_BYTES if is_enforced else None)}


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rows: list[Row] = []
    for name in options.programs:
        log = options.folder / f"{name}.log"
        program = ["-m", "benchmarks.limit.fit_programs", name, "--steps", str(options.steps)]
        free = run(program, log, None)
        if free["end"] != "finished":
            raise RuntimeError(f"{name} fails without a limit; its output is in {log}")
        added = free["peak_bytes"] - free["rest_bytes"]
        print(f"{name}: {free['rest_bytes'] / MIB:.0f} MiB at rest, {added / MIB:.0f} more", flush=True)
        row: Row = {"program": name, "free": free, "added_bytes": added, "limits": []}
        rows.append(row)
        for share in options.shares:
            limit_bytes = free["rest_bytes"] + share * added
            log = options.folder / f"{name}-{share}.log"
            found: Row = {"share": share, "limit_bytes": limit_bytes}
            found["plain"] = run(program, log.with_suffix(".plain.log"), limit_in_force(limit_bytes))
            found["fit"] = fitted(program, limit_bytes, options.folder, log)
            if found["fit"]["end"] == "killed":
                unlimited = fitted(
                    program, limit_bytes, options.folder, log.with_suffix(".free.log"), is_enforced=False
                )
                found["fit"]["named_bytes"] = unlimited["named_bytes"]
            if found["fit"]["named_bytes"]:
                found["named"] = fitted(
                    program, found["fit"]["named_bytes"], options.folder, log.with_suffix(".named.log")
                )
            for kind in ("fit", "named"):
                if kind in found:
                    found[kind]["is_equal"] = found[kind].get("digest") == free["digest"]
            row["limits"].append(found)
            print_rows([cells(row, found)])
            yield {"rows": rows, "num_steps": options.steps}


def cells(row: Row, found: Row) -> dict[str, str]:
    fit, free = found["fit"], row["free"]
    shown = {
        "script": row["program"],
        "share": f"{found['share']:.2f}",
        "limit": f"{found['limit_bytes'] / MIB:.0f}",
        "plain": found["plain"]["end"],
        "fit": fit["end"],
        "starts": str(fit["num_starts"]),
        "peak": f"{fit['peak_bytes'] / MIB:.0f}",
        "CPU": f"{fit['cpu_s'] / free['cpu_s']:.2f}" if "cpu_s" in fit else "-",
        "weights": ("equal" if fit["is_equal"] else "DIFFER") if fit["end"] == "finished" else "-",
    }
    named = found.get("named")
    if named is not None:
        shown["named"] = f"{named['memory']}: {named['end']}{'' if named['is_equal'] else ', NOT EQUAL'}"
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="on a local disk, for logs and what leaves memory")
    add("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="default: all")
    add("--shares", nargs="+", type=float, default=list(SHARES), help="of the memory that training adds")
    add("--steps", type=int, default=3, help="updates of each script (default: %(default)s)")
    options = parser.options(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.output or results_path("fit-table", CPU)
    for found in measure(options):
        write_results({**environment(CPU), "benchmark": "limit.fit_table", **found}, path)


if __name__ == "__main__":
    main()
