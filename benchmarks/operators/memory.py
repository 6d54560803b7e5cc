"""Training steps of an FNO on graphics cards of 8, 16 and 24 GB, emulated by a limit on torch's allocator.

    python -m benchmarks.operators.memory

A step is forward, relative L2 loss and backward in float32. Without a limit every mode is timed at 256 x 256 and 512 x
512, batch 16, the plain run first and last; then, on each card, batches at 512 x 512 grow until a mode no longer fits.
The limit emulates a card's capacity, not its speed or its link. Each cell has a process of its own. Without an
accelerator a toy FNO runs on the CPU, and only gradients and bytes are reported: neither times nor device memory mean
anything there.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.activations.model import compared, saved_by
from benchmarks.cells import UNFINISHED, Cell, Report, Row, compare, own_failures, run_cells
from benchmarks.common import current_device, host_limit_gib, limit_memory, results_path, usable_bytes
from benchmarks.operators.modes import MODES, OURS, SIZES, Handling, Setting, Work, build_model
from benchmarks.operators.report import TARGETS, print_report, ran, verdicts
from benchmarks.timing import first_step_s, timed

TEMPORARIES_MARGIN = 1.1
WARMUP_STEPS = 4  # after them "ours auto" follows its plan
AGAIN = "plain again"  # at the end: how far two runs of the same differ


def measure(settings: dict[str, Any], folder: Path) -> Row:
    """One mode at one batch size, on a card or without a limit."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first matrix product
    device = current_device()
    if device.type == "cpu":
        torch.set_num_threads(1)  # tensors are so small that more threads only wait for each other
    model = build_model(settings["size"], device)
    setting = setting_of(model, device, settings)
    limit_memory(settings["card_gb"])
    mode = settings["mode"] if settings["mode"] != AGAIN else "plain"
    with MODES[mode](setting) as handling:
        work = Work.make(model, settings["nodes"], settings["batch_size"], device)
        found = steps_of(handling, work, device, settings)
        found |= compared(lambda: work.step(handling.context), model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    facts = {"num_parameters": num_parameters, "saved_bytes": setting.saved_bytes}
    return {**facts, **found}


def steps_of(handling: Handling, work: Work, device: torch.device, settings: dict[str, Any]) -> Row:
    """Times and peaks, and what the offloader says of itself."""

    def step() -> None:
        work.step(handling.context)

    found: Row = {"first_step_s": first_step_s(step, device)}
    for _ in range(WARMUP_STEPS - 1):
        step()
    before = handling.stats()
    found |= timed(step, device, max_steps=settings["steps"], max_seconds=settings["seconds_per_cell"])
    if device.type == "cpu":
        step()
    after = handling.stats()
    if "step_ms" in found:
        found["samples_per_s"] = 1e3 * settings["batch_size"] / found["step_ms"]["median"]
    if before is not None and after is not None:
        num_steps = found["step_ms"]["num_steps"] if "step_ms" in found else 1
        found |= {
            "moved_bytes": (after.bytes_moved - before.bytes_moved) // num_steps,
            "stall_ms": (after.stall_ms - before.stall_ms) / num_steps,
            "budget_bytes": handling.budget_bytes,
            "predicted_peak_gib": after.predicted_peak_gib,
            "offloader_peak_gib": after.measured_peak_gib,
        }
    return found


def setting_of(model: torch.nn.Module, device: torch.device, settings: dict[str, Any]) -> Setting:
    """Bytes of one sample, times the batch: everything that is saved or temporary has a batch dimension."""
    batch_size = settings["batch_size"]
    sample = Work.make(model, settings["nodes"], 1, device)
    saved = saved_by(sample)
    room = None
    if settings["card_gb"] is not None:
        temporary = TEMPORARIES_MARGIN * batch_size * temporary_bytes(sample, saved.unique_bytes, device)
        room = round(usable_bytes(settings["card_gb"]) - torch.accelerator.memory_allocated(device) - temporary)
    return Setting(
        model,
        device,
        saved.unique_bytes * batch_size,
        saved.views_pinned_bytes * batch_size,
        round(settings["host_limit_gib"] * 2**30),
        room,
    )


def temporary_bytes(work: Work, saved_bytes: int, device: torch.device) -> int:
    """By how much the peak of a plain step exceeds weights, gradients, data and saved activations."""
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    with MODES["plain"](None) as handling:
        work.step(handling.context)
    return int(torch.accelerator.max_memory_allocated(device) - before - saved_bytes)


def judge(rows: list[Row]) -> None:
    """Compare gradients with those of the plain run; where not even that fits, with checkpointing's."""
    compare(rows, "gradient_digest", "gradients_equal", ["nodes", "batch_size"], ["plain", "checkpointing"])


def pointless(settings: dict[str, Any], rows: list[Row]) -> str | None:
    """A larger batch than one that does not fit."""
    smaller = [row for row in rows if (row["card_gb"], row["mode"]) == (settings["card_gb"], settings["mode"])]
    if settings["card_gb"] is not None and any("error" in row and ran(row) for row in smaller):
        return "a smaller batch does not fit"
    return None


REPORT = Report(TARGETS, judge, print_report, verdicts, pointless)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Without a card, then on each card from the smallest batch on."""
    for nodes in options.nodes:
        for mode in options.modes:
            yield cell(options, card_gb=None, nodes=nodes, batch_size=options.batch_size, mode=mode)
    for card_gb in options.cards:
        for mode in options.modes:
            for batch_size in options.batch_sizes:
                if mode != AGAIN:
                    yield cell(options, card_gb=card_gb, nodes=options.nodes[-1], batch_size=batch_size, mode=mode)


def cell(options: argparse.Namespace, **what: Any) -> Cell:
    shared = {name: getattr(options, name) for name in ("size", "host_limit_gib", "steps", "seconds_per_cell")}
    card = "" if what["card_gb"] is None else f", {what['card_gb']:g} GB"
    name = f"{what['mode']}, {what['nodes']} x {what['nodes']}, batch {what['batch_size']}{card}"
    return Cell("operators.memory", name, {**what, **shared}, ("neuralop",))


def parse(arguments: list[str] | None, device: torch.device) -> argparse.Namespace:
    """The command line's options; defaults depend on whether there is an accelerator."""
    on_cpu = device.type == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=SIZES, default="toy" if on_cpu else "real", help="of the model (here: %(default)s)")
    add("--nodes", nargs="+", type=int, default=[16] if on_cpu else [256, 512], help="per side (here: %(default)s)")
    add("--batch-size", type=int, default=4 if on_cpu else 16, help="without a card (here: %(default)s)")
    add("--batch-sizes", nargs="+", type=int, default=[4, 8, 16, 32, 64], help="on cards, at the last of --nodes")
    add("--cards", nargs="*", type=float, default=[] if on_cpu else [8, 16, 24], help="in GB (here: %(default)s)")
    add("--modes", nargs="+", choices=[*MODES, AGAIN], default=[*MODES, AGAIN], help="default: all")
    add("--host-limit-gib", type=float, default=host_limit_gib(), help="here: %(default)s")
    add("--steps", type=int, default=5, help="timed steps of each cell, at most (default: %(default)s)")
    add("--seconds-per-cell", type=float, default=5.0, help="stop timing a cell after this (default: %(default)s)")
    add("--time-limit-s", type=float, default=510.0, help="of the whole run (default: %(default)s)")
    add("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    options = parser.parse_args(arguments)
    if on_cpu and options.cards:
        parser.error("--cards needs an accelerator: there is no device memory to limit on a CPU")
    return options


def main(arguments: list[str] | None = None) -> int:
    device = current_device()
    options = parse(arguments, device)
    output = options.output or results_path(f"neural-operator-{options.size}", device)
    results = run_cells("operators.memory", list(cells(options)), output, time_limit_s=options.time_limit_s)
    excused = ("OutOfMemoryError", "InfeasibleBudgetError", *UNFINISHED)
    return 1 if own_failures(results["cells"], lambda row: row["mode"] in OURS, excused) else 0


if __name__ == "__main__":
    sys.exit(main())
