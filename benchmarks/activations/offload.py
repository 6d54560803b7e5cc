"""Training steps of Qwen3-8B-shaped layers with activations kept, recomputed, or moved to the host.

    python -m benchmarks.activations.offload

A step is forward and backward of one sequence in bfloat16, without an optimizer, which would add the same to every
mode. Each mode runs in a process of its own, and the plain run twice: first and last. Attention is always torch's
flash kernel, so that gradients can be compared bit for bit. Without an accelerator toy layers run on the CPU, and only
gradients, bytes and plans are reported.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.activations.model import (
    SIZES,
    Work,
    build_model,
    compared,
    flash_attention,
    prepared_device,
    saved_by_all_layers,
    temporary_bytes,
)
from benchmarks.activations.modes import MODES, OURS, Handling, Setting, settle
from benchmarks.activations.report import TARGETS, print_report
from benchmarks.cells import Cell, Report, Row, compare, run_cells
from benchmarks.common import BenchmarkParser, current_device, host_limit_gib, host_rss_bytes, results_path
from benchmarks.timing import first_step_s, timed

AGAIN = "none again"  # the plain run at the end, as a control


def measure(settings: dict[str, Any], folder: Path) -> Row:
    device = prepared_device()
    model = build_model(settings["size"], settings["layers"], device)
    work = Work.make(model, settings["num_tokens"], device)
    with flash_attention(device):
        saved = saved_by_all_layers(work)
        workload = {"saved_bytes": saved.unique_bytes, "temporary_bytes": temporary_bytes(work, device)}
        setting = Setting(model, device, saved, round(settings["host_limit_gib"] * 2**30))
        mode = settings["mode"] if settings["mode"] != AGAIN else "none"
        return {**workload, **steps_of(MODES[mode](setting), work, setting, settings)}


def steps_of(handling: Handling, work: Work, setting: Setting, settings: dict[str, Any]) -> Row:
    host_allocations: list[int] = []

    def step() -> None:
        work.step(handling.context)
        stats = handling.stats()
        host_allocations.append(0 if stats is None else stats.num_host_allocations)

    found: Row = {"first_step_s": first_step_s(step, setting.device), "budget_bytes": handling.budget_bytes}
    settle(handling, step, settings["warmup"] - 1)
    before = handling.stats()
    found |= timed(step, setting.device, max_steps=settings["steps"], max_seconds=settings["seconds_per_cell"])
    after = handling.stats()
    if "step_ms" in found:
        found["tokens_per_s"] = 1e3 * settings["num_tokens"] / found["step_ms"]["median"]
        if before is not None and after is not None:
            num_steps = found["step_ms"]["num_steps"]
            found["stall_ms"] = (after.stall_ms - before.stall_ms) / num_steps
            found["moved_bytes"] = (after.bytes_moved - before.bytes_moved) // num_steps
    work.clear()
    return {
        **found,
        **compared(step, work.model),
        **account(handling, host_allocations),
        "host_rss_bytes": host_rss_bytes(),
    }


def account(handling: Handling, host_allocations: list[int]) -> Row:
    stats = handling.stats()
    if stats is None:
        return {}
    return {
        "predicted_peak_gib": stats.predicted_peak_gib,
        "offloader_peak_gib": stats.measured_peak_gib,
        "predicted_step_ms": stats.predicted_step_ms,
        "offloader_step_ms": stats.measured_step_ms,
        "host_bytes": stats.host_bytes_pinned,
        "total_moved_bytes": stats.bytes_moved,
        "host_allocations": host_allocations,
        "late_host_allocations": host_allocations[-1] - host_allocations[1],
    }


def judge(rows: list[Row]) -> None:
    """Compare gradients with the plain run's, or with checkpointing's if the plain run does not fit."""
    compare(rows, "gradient_digest", "gradients_equal", ["num_tokens"], ["none", "checkpointing"])


REPORT = Report(TARGETS, print_report, judge, is_ours=lambda row: row["mode"] in OURS)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    shared = {name: getattr(options, name) for name in ("size", "layers", "warmup", "steps", "seconds_per_cell")}
    shared["host_limit_gib"] = options.host_limit_gib
    for num_tokens in options.tokens:
        for mode in (mode for mode in (*MODES, AGAIN) if mode in options.modes):
            settings = {"mode": mode, "num_tokens": num_tokens, **shared}
            needs = ("trl",) if mode == "TRL" else ()
            yield Cell("activations.offload", f"{mode}, {num_tokens} tokens", settings, needs)


def main(arguments: list[str] | None = None) -> int:
    device = current_device()
    on_cpu = device.type == "cpu"
    parser = BenchmarkParser(__doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="toy" if on_cpu else "real", help="of the layers (here: %(default)s)")
    add("--layers", type=int, default=8 if on_cpu else 6, help="at least 2 (here: %(default)s)")
    add("--tokens", nargs="+", type=int, default=[128] if on_cpu else [8192, 32768], help="here: %(default)s")
    add("--modes", nargs="+", choices=[*MODES, AGAIN], default=[*MODES, AGAIN], help="default: all")
    add("--host-limit-gib", type=float, default=host_limit_gib(), help="host memory to take (here: %(default)s)")
    add("--warmup", type=int, default=2, help="untimed steps of each cell, at least 2 (default: %(default)s)")
    add("--steps", type=int, default=5, help="timed steps of each cell, at most (default: %(default)s)")
    add("--seconds-per-cell", type=float, default=8.0, help="stop timing a cell after this (default: %(default)s)")
    add("--time-limit-s", type=float, default=510.0, help="of the whole run (default: %(default)s)")
    options = parser.options(arguments)
    if options.warmup < 2 or options.layers < 2:
        parser.error("--warmup and --layers must be at least 2")
    output = options.output or results_path(f"activation-offload-{options.size}", device)
    return run_cells("activations.offload", list(cells(options)), output, time_limit_s=options.time_limit_s)


if __name__ == "__main__":
    sys.exit(main())
