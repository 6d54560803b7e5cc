"""Cells: the smallest pieces of a benchmark, each measured in a process of its own.

A benchmark is a module with a function `measure(settings, folder)` and a `REPORT`. Settings are JSON values, the folder
is shared by all cells of a run, and the returned dictionary becomes a row of the results. Processes are forked from a
server that has imported the benchmark and never touched an accelerator, so that a cell costs no imports.
"""

import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.common import slug, write_results

# Beginnings of errors that say nothing against a cell: another run may measure it.
UNFINISHED = ("not run", "not finished")

FACTS_S = 300.0

Row = dict[str, Any]


class UnavailableError(RuntimeError):
    """Raised by a cell that this machine cannot run, with the reason."""


@dataclass(frozen=True)
class Cell:
    benchmark: str  # module below `benchmarks` with the function `measure`
    name: str  # unique within a run
    settings: dict[str, Any]  # argument of `measure`
    needs: tuple[str, ...] = ()  # packages that the cell imports
    environ: dict[str, str] = field(default_factory=dict)  # that CUDA reads when it starts

    @property
    def title(self) -> str:
        return f"{self.benchmark}: {self.name}"


@dataclass(frozen=True)
class Report:
    """The evaluation of a benchmark's rows."""

    targets: Any  # limits, written into the results
    show: Callable[[dict[str, Any]], None]  # prints tables and targets
    judge: Callable[[list[Row]], None] = lambda rows: None  # adds comparisons of rows to them
    is_ours: Callable[[Row], bool] = lambda row: True  # whether a row is of this library, which may not fail


def run_cells(benchmark: str, cells: Sequence[Cell], output: Path, *, time_limit_s: float) -> int:
    """Measure cells, up to a time limit for all, evaluate them, and store the results; return the exit status."""
    begun = time.perf_counter()
    preload()
    report: Report = importlib.import_module(f"benchmarks.{benchmark}").REPORT
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {**facts(folder), "benchmark": benchmark, "targets": report.targets}
        measure_all(cells, folder, results, output, begun=begun, time_limit_s=time_limit_s, judge=report.judge)
    report.show(results)
    print("wrote", output)
    return 1 if own_failures(results["cells"], report.is_ours) else 0


def measure_all(
    cells: Iterable[Cell],
    folder: Path,
    results: dict[str, Any],
    output: Path,
    *,
    begun: float,
    time_limit_s: float,
    judge: Callable[[list[Row]], None] = lambda rows: None,
) -> None:
    """Add to the results one cell after the other, up to a time limit for all; the file is rewritten after each."""
    results |= {"cells": [], "complete": False}
    for cell in cells:
        row = found_by(cell, folder, time_limit_s - (time.perf_counter() - begun))
        results["cells"].append({**cell.settings, **row})
        judge(results["cells"])
        write_results(results, output)
        print(f"{time.perf_counter() - begun:6.1f} s  {cell.name}: {row.get('error', 'done')[:200]}", flush=True)
    results["complete"] = True
    write_results(results, output)


def facts(folder: Path) -> dict[str, Any]:
    """Return hardware, link, versions, commit and date, found in a process of its own."""
    found = isolated(Cell("common", "facts", {}), folder, FACTS_S)
    if "error" in found:
        raise RuntimeError(f"the accelerator does not answer: {found['error']}")
    return found


def found_by(cell: Cell, folder: Path, limit_s: float) -> Row:
    """Return the figures of a cell, or its error: a failure, or a lack of memory, is a result too."""
    missing = [package for package in cell.needs if importlib.util.find_spec(package) is None]
    if missing:
        return {"error": f"not run: {', '.join(missing)} is not installed"}
    if limit_s <= 0:
        return {"error": "not run: the time limit was reached"}
    return isolated(cell, folder, limit_s)


def preload() -> None:
    """Start the server, which imports the benchmarks that this process has imported.

    The module that is run itself is left out: each process imports it anew, under another name.
    """
    # A query of CUDA itself would make it unusable in forked processes; a query of NVML does not.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    run = getattr(sys.modules["__main__"].__spec__, "name", "")
    names = {name for name in sys.modules if name.startswith("benchmarks.") and name != run}
    multiprocessing.get_context("forkserver").set_forkserver_preload(["benchmarks.blind", *sorted(names)])
    forkserver.ensure_running()


def isolated(cell: Cell, folder: Path, limit_s: float) -> Row:
    """Measure a cell in a process of its own, which is killed with its children after `limit_s` seconds."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    name = slug(cell.title)
    log, result = logs / f"{name}.txt", logs / f"{name}.json"
    result.unlink(missing_ok=True)
    process = multiprocessing.get_context("forkserver").Process(target=_measure_into, args=(cell, folder, result, log))
    process.start()
    try:
        process.join(None if limit_s == float("inf") else limit_s)
    finally:
        in_time = not process.is_alive()
        _kill(process)
    if not in_time:
        return {"error": f"not finished: took longer than the {limit_s:.0f} s that were left"}
    if result.exists():
        row: Row = json.loads(result.read_text())
        result.unlink()
        return row
    end = log.read_text(errors="replace").strip()[-1500:] if log.exists() else ""
    return {"error": f"process ended with {process.exitcode}: {end}"}


def in_this_process(cell: Cell, folder: Path, limit_s: float) -> Row:
    with patch.dict(os.environ, cell.environ):
        try:
            row: Row = importlib.import_module(f"benchmarks.{cell.benchmark}").measure(cell.settings, folder)
        except UnavailableError as error:
            return {"error": f"not run: {error}"}
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}
    return row


def compare(rows: Sequence[Row], found: str, verdict: str, work: Sequence[str], references: Sequence[str]) -> None:
    """Add to each row whether `found` is that of the first mode of `references` with the same `work`; None without."""
    for row in (row for row in rows if found in row):
        same = [other for other in rows if found in other and all(other[name] == row[name] for name in work)]
        by_mode = {other["mode"]: other[found] for other in reversed(same)}
        reference = next((by_mode[mode] for mode in references if mode in by_mode), None)
        row[verdict] = None if reference is None else row[found] == reference


def own_failures(rows: Sequence[Row], is_ours: Callable[[Row], bool]) -> list[Row]:
    """Return this library's rows that failed for another reason than memory or time, or whose gradients differ."""
    return [
        row
        for row in rows
        if is_ours(row)
        and not row.get("error", "").startswith(("OutOfMemoryError", *UNFINISHED))
        and ("error" in row or row.get("gradients_equal") is False)
    ]


def _measure_into(cell: Cell, folder: Path, result: Path, log: Path) -> None:
    os.setsid()  # a group of its own, so that children can be killed too
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    write_results(in_this_process(cell, folder, float("inf")), result)


def _kill(process: BaseProcess) -> None:
    """Kill a process with its children, if any are left."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):  # all have ended, or it has not made its group yet
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
