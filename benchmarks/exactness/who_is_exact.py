"""Which switches that save memory leave training bit for bit as it is: ours, and those of other projects, on a CPU.

    python -m benchmarks.exactness.who_is_exact
    python -m benchmarks.exactness.who_is_exact --rows torch trl
    python -m benchmarks.exactness.who_is_exact --print benchmarks/results/who-is-exact-cpu-amd-epyc.json

Each row is a run of `hf-memopt verify`, or of `hf_memopt.verify` on two functions, in a process of its own. A row that
fails says so, and the others go on. With `--rows` the other rows stay in the file as they were measured before.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common import CPU, BenchmarkParser, environment, finish, measured_commit, results_path
from benchmarks.exactness.rows import PAIRS, ROWS, SCRIPTS, Row
from hf_memopt.report.doctor import version_of

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900
LAST_LINES = 5  # of a failed row's log
PROJECTS = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "torchao", "sentence-transformers")


def measure(rows: Sequence[Row], workers: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(workers) as threads, tqdm(total=len(rows), unit="row") as bar:

        def counted(row: Row) -> dict[str, Any]:
            found = measure_row(row)
            bar.write(f"{row.project}, {row.switch}: {verdict(found)}", file=sys.stderr)
            bar.update()
            return found

        return list(threads.map(counted, rows))


def measure_row(row: Row) -> dict[str, Any]:
    """Return the row's own facts, and its report or its error."""
    began = time.perf_counter()
    found: dict[str, Any] = {
        **{name: getattr(row, name) for name in ("project", "switch", "note", "issue")},
        "version": version_of(row.project),
        "command": shown_command(row),
        "commit": measured_commit(),
        "date": date.today().isoformat(),
    }
    if row.command:
        report, log = run(row)
        found |= {"report": report} if report else {"error": log}
        found["seconds"] = round(time.perf_counter() - began, 1)
    return found


def run(row: Row) -> tuple[dict[str, Any] | None, str]:
    """Run a row and return its report, if there is one, and the end of its log."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        python = [sys.executable, "-m"]
        if row.is_pair:
            command = [*python, *row.command, "--json", str(answer)]
        else:
            command = [*python, "hf_memopt.cli", "verify", "--json", *row.command]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment_of(row), capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return None, f"more than {LIMIT_S} s"
        text = (answer.read_text() if answer.exists() else "") if row.is_pair else done.stdout
    log = "\n".join(done.stderr.strip().splitlines()[-LAST_LINES:])
    return (json.loads(text), log) if text.strip() else (None, log)


def environment_of(row: Row) -> dict[str, str]:
    if not row.needs_rank:
        return dict(os.environ)
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return os.environ | rank


def shown_command(row: Row) -> str:
    words = shlex.join(row.command)
    return words.replace(f"-- -m {SCRIPTS}.", "-- ").replace(f"{PAIRS} ", "pairs ")


def verdict(row: dict[str, Any]) -> str:
    if "report" in row:
        return row["report"]["verdict"]
    return "failed" if "error" in row else "not run"


def details(row: dict[str, Any]) -> Iterator[str]:
    """Yield how much differs, then what is not compared, and the row's note."""
    report = row.get("report")
    if report:
        yield from amounts(report)
        phases = sorted({each.split(":")[0] for each in report["not_compared"]})
        if phases:
            yield f"not compared: {', '.join(phases)}"
    elif "error" in row:
        yield row["error"].splitlines()[-1] if row["error"] else "no answer"
    if row["note"]:
        yield row["note"]
    if row["issue"]:
        yield row["issue"]


def amounts(report: dict[str, Any]) -> Iterator[str]:
    first, worst = report["first"], report["worst"]
    match report["verdict"]:
        case "equal":
            return
        case "rounding":
            yield f"at most {excess(worst):.2g} x"
        case _:
            yield f"{place(first)}: {size(first)}"
            cause, times, _ = report["advice"].partition(" times the plain one")
            if times:
                yield cause + times


def place(found: dict[str, Any]) -> str:
    shown = found["text"].partition(", ")[0]
    for long in (" after backward of micro-batch 1 of", " of micro-batch 1 of"):
        shown = shown.replace(long, ",")
    return shown


def size(found: dict[str, Any]) -> str:
    """Return the size of a difference; numbers that are not finite are text."""
    relative = found["relative"]
    share = relative if isinstance(relative, str) else f"{relative:.2g}"
    return f"relative {share}" + ("" if found["of_yardstick"] is None else f", {excess(found):.2g} x")


def excess(found: dict[str, Any]) -> float:
    """Return the size of a difference as a multiple of what rounding may have."""
    return float(found["of_yardstick"]) / float(found["allowed"])


def print_report(results: dict[str, Any]) -> None:
    rows = results["rows"]
    counts = {name: sum(verdict(row) == name for row in rows) for name in dict.fromkeys(map(verdict, rows))}
    print(f"{len(rows)} switches: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    for (project, number), of_project in groupby(rows, key=lambda row: (row["project"], row["version"])):
        print(f"\n## {project} {number}\n\n| switch | verdict | how much | run |\n|---|---|---|---|")
        for row in of_project:
            command = f"`{row['command'].replace('--switch ', '')}`" if row["command"] else "-"
            cells = [row["switch"], verdict(row), "; ".join(details(row)), command]
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")


def chosen(names: Sequence[str] | None) -> list[Row]:
    """Return the rows whose project, or whose text of project and switch, is named."""
    found = [row for row in ROWS if names is None or any(name in f"{row.project}: {row.switch}" for name in names)]
    if not found:
        raise ValueError(f"--rows {' '.join(names or ())}: no row has such a text; there are {len(ROWS)} rows")
    return found


def in_order(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last measurement of each row, in the order of `ROWS`; those of rows that are no more are left out."""
    found = {(row["project"], row["switch"]): row for row in measured}
    keys = ((row.project, row.switch) for row in ROWS)
    return [found[key] for key in keys if key in found]


def main(arguments: list[str] | None = None) -> None:
    parser = BenchmarkParser(__doc__)
    parser.add_argument("--rows", nargs="+", metavar="TEXT", help="only rows with one of these in 'project: switch'")
    parser.add_argument("--workers", type=int, default=1, help="rows at once (default: %(default)s)")
    parser.add_argument("--print", type=Path, metavar="FILE", help="print the table of this JSON file and run nothing")
    options = parser.options(arguments)
    if options.print:
        print_report(json.loads(options.print.read_text()))
        return
    output = options.output or results_path("who-is-exact", CPU)
    before = json.loads(output.read_text())["rows"] if options.rows and output.exists() else []
    rows = in_order([*before, *measure(chosen(options.rows), options.workers)])
    results = {**environment(CPU), "benchmark": "exactness.who_is_exact", "rows": rows}
    results["versions"] |= {name: version_of(name) for name in PROJECTS}
    finish(results, print_report, output, "who-is-exact")


if __name__ == "__main__":
    main()
