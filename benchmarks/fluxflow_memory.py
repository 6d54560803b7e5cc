"""Peak memory and growth of FluxFlow's: plain, with the seed's LPIPS checkpointing, and with our levers.

    python benchmarks/fluxflow_memory.py

At 512 x 512 each variant runs on a card of 8 GB, emulated by a limit on torch's allocator, with growing batches, and
once without a limit, where peaks and times are compared. Then 2,000 steps at changing resolutions, with the default
allocator, with its cache emptied at every 16th step, and with expandable segments: how much memory grows. The limit
emulates a card's capacity, not its speed. Each cell has a process of its own. Without an accelerator a toy runs on the
CPU, and only gradients are reported.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import MIB, current_device, environment, print_table, results_path, write_results
from fluxflow_memory_cell import VARIANTS

TARGETS = {"card_gb": 8, "batch_size": 3, "peak_of_seed": 0.8, "time_of_seed": 1.05, "growth": 0.001}
ALLOCATORS: dict[str, dict[str, Any]] = {
    "default": {},
    "empty_cache every 16": {"empty_cache_every": 16},
    "expandable segments": {"allocator": "expandable_segments:True"},
}
NORM_TOLERANCE = 1e-2  # of gradients' norms, between variants that sum in another order with bfloat16 and TF32


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """First what the targets need."""
    shared = {"size": options.size, "lpips": not options.no_lpips, "bf16": options.bf16, "warmup_steps": 2}
    step = {**shared, "part": "step", "resolution": options.resolution, "steps": options.steps}
    for variant in options.variants:
        yield {**step, "variant": variant, "card_gb": None, "batch_size": options.batch_sizes[-2]}
    for card_gb in options.cards:
        for batch_size in options.batch_sizes:
            for variant in options.variants:
                yield {**step, "variant": variant, "card_gb": card_gb, "batch_size": batch_size}
    for name in options.allocators:
        yield {
            **shared,
            "part": "growth",
            "variant": "ours",
            "allocator_name": name,
            "size": options.growth_size,
            "card_gb": None,
            "batch_size": 2,
            "resolution": options.growth_resolution,
            "scales": [1.0, 0.75, 0.5],
            "steps": options.growth_steps,
            "max_seconds": options.growth_seconds,
            "empty_cache_every": 0,
            **ALLOCATORS[name],
        }


def run_cell(cell: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """In a process of its own; what it failed of is a result."""
    environ = {**os.environ, **({"PYTORCH_ALLOC_CONF": cell["allocator"]} if "allocator" in cell else {})}
    command = [sys.executable, str(Path(__file__).with_name("fluxflow_memory_cell.py")), json.dumps(cell)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environ, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not finished: took longer than the {timeout_s:.0f} s that were left"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_all(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every cell, the results file rewritten after each."""
    begun = time.perf_counter()
    output = options.output or results_path(f"fluxflow-memory-{options.size}", device)
    results = {
        **environment(device),
        "benchmark": "fluxflow_memory",
        "targets": TARGETS,
        "cells": [],
        "complete": False,
    }
    for cell in cells(options):
        left_s = options.time_limit_s - (time.perf_counter() - begun)
        found = run_cell(cell, left_s) if left_s > 0 else {"error": "not run: --time-limit-s was reached"}
        results["cells"].append({**cell, **found})
        write_results(results, output)
        name = [str(cell[key]) for key in ("part", "variant", "card_gb", "batch_size", "allocator_name") if key in cell]
        print(
            f"{time.perf_counter() - begun:6.1f} s  {', '.join(name)}: {found.get('error', 'done')[:160]}", flush=True
        )
    results["complete"] = True
    write_results(results, output)
    return results


def print_report(results: dict[str, Any]) -> None:
    """A row for each cell, and the targets."""
    steps = [cell for cell in results["cells"] if cell["part"] == "step"]
    header = ["variant", "card GB", "batch", "peak MiB", "step ms", "gradient norm"]
    print()
    print_table(header, [_step_row(cell) for cell in steps])
    grown = [cell for cell in results["cells"] if cell["part"] == "growth"]
    if grown:
        header = ["allocator", "steps", "ms/step", "reserved-allocated MiB", "growth", "retries"]
        print()
        print_table(header, [_growth_row(cell) for cell in grown])
    print()
    for line in verdicts(results):
        print(line)


def _step_row(cell: dict[str, Any]) -> list[str]:
    peak = f"{cell['peak_bytes'] / MIB:,.0f}" if "peak_bytes" in cell else cell.get("error", "-").partition(":")[0]
    step_ms = f"{cell['step_ms']['median']:.1f}" if "step_ms" in cell else "-"
    norm = f"{cell['grad_norm']:.5g}" if "grad_norm" in cell else "-"
    return [cell["variant"], str(cell["card_gb"] or "-"), str(cell["batch_size"]), peak, step_ms, norm]


def _growth_row(cell: dict[str, Any]) -> list[str]:
    if not cell.get("last"):
        return [cell["allocator_name"], str(cell.get("num_steps", "-")), cell.get("error", "-")[:40], "-", "-", "-"]
    last = cell["last"]
    idle = (last["reserved_bytes"] - last["allocated_bytes"]) / MIB
    figures = [f"{cell['ms_per_step']:.1f}", f"{idle:,.0f}", f"{growth_of(cell):.3%}", str(last["num_alloc_retries"])]
    return [cell["allocator_name"], str(cell["num_steps"]), *figures]


def growth_of(cell: dict[str, Any]) -> float:
    """Of allocated memory between steps, as a share of what was allocated early."""
    first, last = (cell[name]["allocated_bytes"] for name in ("first", "last"))
    return float((last - first) / first)


def verdicts(results: dict[str, Any]) -> Iterator[str]:
    """Each target, with what was measured."""
    if results["hardware"]["device"] == "cpu":
        yield "No accelerator: step times and device memory were not measured"
        return
    targets = results["targets"]
    steps = [cell for cell in results["cells"] if cell["part"] == "step"]
    on_card = [c for c in steps if c["card_gb"] == targets["card_gb"] and c["batch_size"] == targets["batch_size"]]
    fitting = [cell["variant"] for cell in on_card if "error" not in cell]
    yield f"batch {targets['batch_size']} on {targets['card_gb']} GB: {', '.join(fitting) or 'none'} of {len(on_card)}"
    free = {cell["variant"]: cell for cell in steps if cell["card_gb"] is None and "peak_bytes" in cell}
    for variant in ("ours", "ours checkpointed", "ours offloaded"):
        if variant in free and "seed" in free:
            yield _against_seed(variant, free[variant], free["seed"], targets)
    for cell in (cell for cell in results["cells"] if cell["part"] == "growth" and cell.get("last")):
        yield f"growth over {cell['num_steps']} steps, {cell['allocator_name']}: {growth_of(cell):.3%}" + _met(
            growth_of(cell) <= targets["growth"], f"{targets['growth']:.1%}"
        )


def _against_seed(variant: str, ours: dict[str, Any], seed: dict[str, Any], targets: dict[str, Any]) -> str:
    peak = ours["peak_bytes"] / seed["peak_bytes"]
    duration = ours["step_ms"]["median"] / seed["step_ms"]["median"]
    met = peak <= targets["peak_of_seed"] and duration <= targets["time_of_seed"]
    wanted = f"{targets['peak_of_seed']} x at {targets['time_of_seed']} x"
    return f"{variant}: {peak:.2f} x the seed's peak at {duration:.2f} x its time" + _met(met, wanted)


def _met(met: bool, target: str) -> str:
    return f" (target {target}: {'met' if met else 'missed'})"


def failures(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells that failed for another reason than memory or time, and those whose gradients' norm is another."""
    excused = ("OutOfMemoryError", "not run", "not finished")
    failed = [cell for cell in results["cells"] if "error" in cell and not cell["error"].startswith(excused)]
    norms = [cell for cell in results["cells"] if "grad_norm" in cell]
    for batch_size in {cell["batch_size"] for cell in norms}:
        group = [cell for cell in norms if cell["batch_size"] == batch_size]
        expected = group[0]["grad_norm"]
        failed += [cell for cell in group if abs(cell["grad_norm"] - expected) > NORM_TOLERANCE * expected]
    return failed


def parse(arguments: list[str] | None, device: torch.device) -> argparse.Namespace:
    """The command line's options; defaults depend on whether there is an accelerator."""
    on_cpu = device.type == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", default="toy" if on_cpu else "real", help="of the model: real, small or toy (here: %(default)s)")
    add("--resolution", type=int, default=16 if on_cpu else 512, help="here: %(default)s")
    add("--batch-sizes", nargs="+", type=int, default=[2, 2] if on_cpu else [2, 3, 4], help="here: %(default)s")
    add("--cards", nargs="*", type=float, default=[] if on_cpu else [8], help="in GB (here: %(default)s)")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    add("--allocators", nargs="*", choices=ALLOCATORS, default=[] if on_cpu else list(ALLOCATORS), help="default: all")
    add("--bf16", action="store_true", help="autocast to bfloat16")
    add("--no-lpips", action="store_true", help="without LPIPS")
    add("--steps", type=int, default=5, help="timed steps of each cell, at most (default: %(default)s)")
    add("--growth-size", default="small", help="of the model (default: %(default)s)")
    add("--growth-resolution", type=int, default=128, help="the largest of three (default: %(default)s)")
    add("--growth-steps", type=int, default=2000, help="default: %(default)s")
    add("--growth-seconds", type=float, default=90.0, help="stop after this (default: %(default)s)")
    add("--time-limit-s", type=float, default=510.0, help="of the whole run (default: %(default)s)")
    add("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    options = parser.parse_args(arguments)
    if len(options.batch_sizes) < 2:
        parser.error("--batch-sizes needs two at least: the last but one is compared without a card")
    return options


def main(arguments: list[str] | None = None) -> int:
    device = current_device()
    results = run_all(parse(arguments, device), device)
    print_report(results)
    return 1 if failures(results) else 0


if __name__ == "__main__":
    sys.exit(main())
