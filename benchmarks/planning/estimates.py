"""Estimates of steps for a card, made on the CPU and stored in a file for a later measurement on a GPU."""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cells import Cell, Row, measure_all, preload
from benchmarks.common import CPU, environment, measured_commit, slug, write_results
from benchmarks.planning.steps import Definition, simulated_step
from hf_memopt.planning.estimate import simulate_step
from hf_memopt.planning.simulation.child_process import run_isolated

BENCHMARK = "planning.estimates"
Step = tuple[str, Definition]


class OtherEstimatesError(ValueError):
    """Raised for a file with estimates for another card or of other steps."""


def measure(settings: dict[str, Any], folder: Path) -> Row:
    """Estimate a step. No accelerator is queried, since simulations could not be forked afterwards."""
    step = simulated_step(settings["definition"], folder / slug(settings["step"]))
    begun = time.perf_counter()
    estimate = run_isolated(lambda: simulate_step(replace(step, repeated=None), gpu=settings["card"]))
    figures = {
        "allocated_bytes": estimate.peak_bytes,
        "reserved_bytes": estimate.reserved_bytes,
        "step_ms": estimate.step_ms,
        "phase": estimate.phase,
        "confidence": estimate.confidence,
        "seconds": round(time.perf_counter() - begun, 2),
        "commit": measured_commit(),
    }
    return {"estimate": figures}


def shared(settings: dict[str, Any], folder: Path) -> Row:
    """Return the same as `measure`, computed once for all cells of a run with the same step."""
    file = folder / f"{slug(settings['step'])}.json"
    if not file.exists():
        write_results(measure(settings, folder), file)
    found: Row = json.loads(file.read_text())
    return found


def write_estimates(steps: Sequence[Step], card: str, output: Path, *, time_limit_s: float) -> dict[str, Any]:
    """Estimate one step after the other; the file is rewritten after each."""
    begun = time.perf_counter()
    results: dict[str, Any] = {**environment(CPU), "benchmark": BENCHMARK, "card": card}
    cells = (
        Cell(BENCHMARK, name, {"step": name, "definition": definition, "card": card}) for name, definition in steps
    )
    preload()
    with tempfile.TemporaryDirectory() as folder:
        measure_all(cells, Path(folder), results, output, begun=begun, time_limit_s=time_limit_s)
    print("wrote", output)
    return results


def read_estimates(file: Path, card: str, steps: Sequence[Step]) -> dict[str, Row]:
    """Return the figures of each step by its name, or the error of its estimate."""
    rows = {row["step"]: row for row in _rows(file, card)}
    changed = [name for name, definition in steps if name not in rows or rows[name]["definition"] != definition]
    if changed:
        raise OtherEstimatesError(
            f"{file} has no estimate of these {len(changed)} steps as they are defined now: {'; '.join(changed)}. "
            f"Choose other steps, or estimate all again: --estimate-only --card {card} --output {file}"
        )
    return {name: rows[name].get("estimate") or {"error": rows[name]["error"]} for name, _ in steps}


def _rows(file: Path, card: str) -> list[Row]:
    results = json.loads(file.read_text())
    if results.get("benchmark") != BENCHMARK:
        raise OtherEstimatesError(f"{file} holds no estimates; --estimate-only writes them")
    if results["card"] != card:
        raise OtherEstimatesError(
            f"{file} holds estimates for {results['card']}, and this run is for {card}; to compare them nevertheless "
            f"add --card {results['card']}"
        )
    rows: list[Row] = results["cells"]
    return rows
