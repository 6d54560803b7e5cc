"""Estimated against measured device memory of training steps.

    python -m benchmarks.planning.estimate --estimate-only --card h100 --output h100.json
    python -m benchmarks.planning.estimate --estimates h100.json
    python -m benchmarks.planning.estimate --recipe train_causal_lm=lm.yaml --recipe train_neural_operator=darcy.yaml

Every step is first estimated, without the device, and then run on it from the same code: transformers models with
random weights, without and with activation checkpointing, and recipes, in three sizes; and recipes with given
configurations, such as a student's folder for reflow_smolvla. Each step runs in a process of its own, and the first one
twice: first and last. With --estimate-only nothing runs on the device, and the estimates are stored in a file; a later
run with --estimates reads them and only measures. Without an accelerator toy models are estimated and nothing is
measured.
"""

import argparse
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import _cur_sdpa_kernel_backends

from benchmarks.cells import Cell, Report, Row, own_failures, run_cells
from benchmarks.common import RESULTS_FOLDER, BenchmarkParser, current_device, results_path, slug
from benchmarks.planning import estimates
from benchmarks.planning.estimate_report import TARGETS, print_report
from benchmarks.planning.steps import MODELS, RECIPES, SIZES, model_steps, recipe_steps, simulated_step
from benchmarks.timing import first_step_s, timed
from hf_memopt.planning.cards.gpus import CARDS, card_named
from hf_memopt.planning.simulated_step import SimulatedStep

BENCHMARK = "planning.estimate"
CUDNN_LAST = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}


def measure(settings: dict[str, Any], folder: Path) -> Row:
    """Estimate one step, before the device is queried, then measure it there."""
    found = {"estimate": settings["estimate"]} if settings["estimate"] else estimates.shared(settings, folder)
    if "error" in found["estimate"]:
        raise RuntimeError(f"not estimated: {found['estimate']['error']}")
    device = current_device()
    if device.type != "cpu":
        step = simulated_step(settings["definition"], folder / slug(settings["step"]))
        found |= measured(step, device, max_steps=settings["steps"], max_seconds=settings["seconds_per_cell"])
        found |= deviations(found)
    return found


def measured(step: SimulatedStep, device: torch.device, *, max_steps: int, max_seconds: float) -> Row:
    """Measure the peaks of as many steps as were estimated, then the times of more steps."""
    reserved_before = torch.accelerator.memory_reserved(device)
    step.build()
    state = step.setup(device)
    gc.collect()
    torch.accelerator.reset_peak_memory_stats(device)
    first_s = first_step_s(lambda: step.step(state), device)
    for _ in range(step.num_steps - 1):
        step.step(state)
    torch.accelerator.synchronize(device)
    return {
        "measured_allocated_bytes": torch.accelerator.max_memory_allocated(device),
        "measured_reserved_bytes": torch.accelerator.max_memory_reserved(device) - reserved_before,
        "first_step_s": first_s,
        **timed(lambda: step.step(state), device, max_steps=max_steps, max_seconds=max_seconds),
        "attention_order": attention_order(),
    }


def attention_order() -> list[str]:
    """Return the enabled attention kernels in torch's order of preference; known after the first attention."""
    return [backend.name for backend in _cur_sdpa_kernel_backends(with_priority=True)]


def deviations(found: Row) -> Row:
    estimate = found["estimate"]
    return {
        "deviation": estimate["allocated_bytes"] / found["measured_allocated_bytes"] - 1,
        "reserved_deviation": estimate["reserved_bytes"] / found["measured_reserved_bytes"] - 1,
        "step_deviation": estimate["step_ms"] / found["step_ms"]["median"] - 1,
    }


def judge(rows: list[Row]) -> None:
    """Add whether the last cell, which repeats the first, has the same bytes."""
    for again in (row for row in rows if row["again"] and "measured_allocated_bytes" in row):
        names = ("measured_allocated_bytes", "measured_reserved_bytes")
        again["same_bytes"] = all(again[name] == rows[0].get(name) for name in names)


REPORT = Report(TARGETS, print_report, judge)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield every step; steps that may use cuDNN's attention also with other kernels preferred."""
    known = {}
    if options.estimates:
        known = estimates.read_estimates(options.estimates, options.card, options.chosen)
    shared = {"card": options.card, "steps": options.steps, "seconds_per_cell": options.seconds_per_cell}
    for position, (step, definition) in enumerate(options.chosen):
        settings = {"step": step, "definition": definition, **shared, "estimate": known.get(step)}
        settings |= {"cudnn_last": False, "again": False}
        yield Cell(BENCHMARK, step, settings)
        if options.measures and definition.get("precision") == "bf16":
            yield Cell(BENCHMARK, f"{step}, cuDNN attention last", {**settings, "cudnn_last": True}, (), CUDNN_LAST)
        if position == 0:
            first = settings
    if options.measures:
        yield Cell(BENCHMARK, f"{first['step']} again", {**first, "again": True})


def running_card(device: torch.device) -> str | None:
    """Return the GPU's name in `CARDS`, by nvidia-smi, which leaves CUDA alone; None if the GPU is not there."""
    if device.type != "cuda":
        return None
    query = ["nvidia-smi", "--id=0", "--query-gpu=name", "--format=csv,noheader"]
    try:
        card = card_named(subprocess.run(query, capture_output=True, text=True, check=False).stdout)
    except FileNotFoundError:
        return None
    return None if card is None else card.name


def parse(arguments: list[str] | None, device: torch.device) -> argparse.Namespace:
    on_cpu = device.type == "cpu"
    card = "h100" if on_cpu else running_card(device)
    parser = BenchmarkParser(__doc__)
    add = parser.add_argument
    add("--models", nargs="*", choices=MODELS, default=list(MODELS), help="default: all")
    add("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES), help="default: all")
    sizes = ["toy"] if on_cpu else ["small", "medium", "large"]
    add("--sizes", nargs="+", choices=SIZES, default=sizes, help="here: %(default)s")
    add("--recipe", action="append", default=[], metavar="NAME=FILE", help="also this recipe")
    add("--card", choices=CARDS, default=card, help="card to estimate for (here: %(default)s)")
    add("--estimate-only", action="store_true", help="leave the device alone, and write the estimates")
    add("--estimates", type=Path, help="file of estimates to read")
    add("--steps", type=int, default=5, help="timed steps of each cell, at most (default: %(default)s)")
    add("--seconds-per-cell", type=float, default=4.0, help="stop timing a cell after this (default: %(default)s)")
    add("--time-limit-s", type=float, help="of the whole run (default: 510, or none with --estimate-only)")
    options = parser.options(arguments)
    if options.card is None:
        parser.error(f"this device is none of the cards that are known; choose one with --card: {', '.join(CARDS)}")
    if options.time_limit_s is None:
        options.time_limit_s = float("inf") if options.estimate_only else 510.0
    options.measures = not on_cpu
    options.chosen = [
        *model_steps(options.models, options.sizes),
        *recipe_steps(options.recipes, options.sizes, options.recipe),
    ]
    if not options.chosen:
        parser.error("no step is chosen: recipes have no toy size")
    return options


def main(arguments: list[str] | None = None) -> int:
    device = current_device()
    options = parse(arguments, device)
    limit_s = options.time_limit_s
    if options.estimate_only:
        output = options.output or RESULTS_FOLDER / f"estimates-{options.card}.json"
        results = estimates.write_estimates(options.chosen, options.card, output, time_limit_s=limit_s)
        return 1 if own_failures(results["cells"], REPORT.is_ours) else 0
    try:
        chosen = list(cells(options))
    except estimates.OtherEstimatesError as error:
        print(error, file=sys.stderr)
        return 2
    return run_cells(BENCHMARK, chosen, options.output or results_path("estimate", device), time_limit_s=limit_s)


if __name__ == "__main__":
    sys.exit(main())
