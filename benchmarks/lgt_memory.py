"""Training steps of the LGT recipe's model on a graphics card of 8 GB, emulated by a limit on torch's allocator.

    python benchmarks/lgt_memory.py

Batches of 32, 96 and 240 latents, 5 and 10 Euler steps with gradients, plain, checkpointed, offloaded and as planned
for such a card, in bfloat16; and batches of 32 accumulated twice, with which throughput is compared at equal samples.
Each cell runs in a process of its own. The limit emulates a card's capacity, not its speed or its link. Without an
accelerator a toy model runs on the CPU, where neither times nor device memory mean anything.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time as clock
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from common import (
    USABLE_SHARE,
    current_device,
    environment,
    limit_memory,
    median_and_spread,
    results_path,
    step_times_ms,
    usable_bytes,
    write_results,
)
from hf_memopt.recipes.lgt_config import Config
from hf_memopt.recipes.lgt_parsing import make_config
from hf_memopt.recipes.lgt_plan import LatentTransferWorkload
from hf_memopt.recipes.lgt_step import Objective, build_model, build_optimizer, make_batch
from lgt_memory_report import print_report

from hf_memopt import ActivationOffloader, SyncCopier, plan
from hf_memopt.planning.cards import allowances, find_card
from hf_memopt.training import train_step

WARMUP_STEPS = 2
CARD_GB = 8

# Fields of the configuration, and options of the offloader where there is one.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "plain": ({}, None),
    "checkpointed": ({"training.use_gradient_checkpointing": True}, None),
    "offloaded": ({}, {"mode": "all", "offload_threshold_mb": 1.0}),
    "planned": ({}, None),  # fields and micro-batch as `plan` finds them for the emulated card
}
TOY = {"model.base_channels": 8, "model.style_dim": 8, "model.time_dim": 8, "data.latent_size": 8}
SIZES: dict[str, dict[str, Any]] = {"real": {}, "toy": TOY}
REMEDY = {"batch_size": 32, "num_steps": 10, "mode": "plain", "num_accumulated": 2}


def measure(cell: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Steps of one cell: the losses of the first ones, and on an accelerator time, throughput and peak memory.

    Raises:
        torch.OutOfMemoryError: it does not fit the card.
    """
    accelerator = Accelerator(mixed_precision="bf16")
    device = accelerator.device
    limit_memory(options.card_gb)
    config, offloading, num_accumulated = settle(cell, options)
    torch.manual_seed(0)
    model = build_model(config).to(device)
    model, optimizer = accelerator.prepare(model, build_optimizer(config, model))
    micro_batches = [make_batch(config, device) for _ in range(num_accumulated)]
    objective = Objective(config)
    offloader = None
    if offloading is not None:
        offloader = ActivationOffloader(**offloading, copier=SyncCopier() if device.type == "cpu" else None)
        offloader.wrap(model)

    def step() -> float:
        norm = config.training.max_grad_norm
        return train_step(accelerator, model, objective, micro_batches, optimizer, max_grad_norm=norm).loss

    found: dict[str, Any] = {"losses": [step() for _ in range(WARMUP_STEPS)]}
    if offloader is not None:
        found["moved_bytes"] = offloader.stats.bytes_moved // WARMUP_STEPS
    if device.type != "cpu":
        times = step_times_ms(step, device, max_steps=options.steps, max_seconds=options.seconds_per_cell)
        found["step_ms"] = {**median_and_spread(times), "num_steps": len(times)}
        num_samples = cell["batch_size"] * cell["num_accumulated"]
        found["samples_per_s"] = 1e3 * num_samples / found["step_ms"]["median"]
        found["peak_bytes"] = torch.accelerator.max_memory_allocated(device)
    return found


def settle(cell: dict[str, Any], options: argparse.Namespace) -> tuple[Config, dict[str, Any] | None, int]:
    """Configuration, options of the offloader, and forward passes per update; those of a plan in mode "planned"."""
    fields, offloading = MODES[cell["mode"]]
    sizes = {"training.batch_size": cell["batch_size"], "training.ode_integration_steps": cell["num_steps"]}
    sizes["training.accumulation_steps"] = cell["num_accumulated"]
    config = make_config({**SIZES[options.size], **sizes, **fields})
    if cell["mode"] == "planned":
        room_bytes = usable_bytes(options.card_gb or CARD_GB)
        card = find_card(f"{CARD_GB}GiB")
        card = replace(card, memory_bytes=room_bytes + sum(allowances(card).values()))
        workload = LatentTransferWorkload(config, precision="bf16")
        best = plan(workload, gpu=card, progress=False).best
        config = workload.with_settings(best.settings, best.micro_batch)
        offloading = {"mode": config.offload.offload} if config.offload.offload != "off" else None
    return config, offloading, config.training.accumulation_steps


def outcome(cell: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What `measure` found, or why it found nothing: that a cell does not fit is a result."""
    try:
        return measure(cell, options)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def in_a_process_of_its_own(cell: dict[str, Any], options: argparse.Namespace, timeout_s: float) -> dict[str, Any]:
    """The cell's outcome, from a memory that nothing else has touched."""
    command = [sys.executable, __file__, "--cell", json.dumps(cell), "--size", options.size]
    command += ["--steps", str(options.steps), "--seconds-per-cell", str(options.seconds_per_cell)]
    if options.card_gb is not None:
        command += ["--card-gb", str(options.card_gb)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": "not run: --time-limit-s was reached"}
    if done.returncode:
        return {"error": f"process ended with {done.returncode}: {done.stderr[-1000:]}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def all_cells(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every combination, the results file written anew after each."""
    begun, output = clock.perf_counter(), options.output or results_path(f"lgt-memory-{options.size}", device)
    results: dict[str, Any] = {
        **environment(device),
        "benchmark": "lgt_memory",
        "size": options.size,
        "card_gb": options.card_gb,
        "usable_share_of_card": USABLE_SHARE,
        "cells": [],
        "complete": False,
    }
    for cell in cells_of(options):
        left_s = options.time_limit_s - (clock.perf_counter() - begun)
        if left_s > 0:
            found = in_a_process_of_its_own(cell, options, left_s)
        else:
            found = {"error": "not run: --time-limit-s was reached"}
        results["cells"].append({**cell, **found})
        write_results(results, output)
        name = ", ".join(f"{value}" for value in cell.values())
        print(f"{clock.perf_counter() - begun:6.1f} s  {name}: {found.get('error', 'done')[:200]}", flush=True)
    results["complete"] = True
    write_results(results, output)
    return results


def cells_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The accumulating cell first: throughput is compared with it."""
    product = itertools.product(options.batch_sizes, options.euler_steps, options.modes)
    cells = [{"batch_size": b, "num_steps": n, "mode": mode, "num_accumulated": 1} for b, n, mode in product]
    remedy = REMEDY if options.size == "real" else {**REMEDY, "batch_size": 2, "num_steps": 2}
    return [remedy, *cells]


def own_failures(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells that failed for another reason than memory or time."""
    excused = ("OutOfMemoryError", "not run")
    return [cell for cell in results["cells"] if "error" in cell and not cell["error"].startswith(excused)]


def parse(arguments: list[str] | None, device: torch.device) -> argparse.Namespace:
    """The command line's options; defaults depend on whether there is an accelerator."""
    on_cpu = device.type == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=SIZES, default="toy" if on_cpu else "real", help="of the model (here: %(default)s)")
    add("--batch-sizes", nargs="+", type=int, default=[4] if on_cpu else [32, 96, 240], help="here: %(default)s")
    add("--euler-steps", nargs="+", type=int, default=[2] if on_cpu else [5, 10], help="here: %(default)s")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    add("--card-gb", type=float, default=None if on_cpu else 8.0, help="GB of the emulated card (here: %(default)s)")
    add("--steps", type=int, default=8, help="timed steps of each cell, at most (default: %(default)s)")
    add("--seconds-per-cell", type=float, default=4.0, help="stop timing a cell after this (default: %(default)s)")
    add("--time-limit-s", type=float, default=510.0, help="all cells together (default: %(default)s)")
    add("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    add("--cell", type=json.loads, help=argparse.SUPPRESS)  # measure this one alone and print what was found
    options = parser.parse_args(arguments)
    if on_cpu and options.card_gb is not None:
        parser.error("--card-gb needs an accelerator: there is no device memory to limit on a CPU")
    return options


def main(arguments: list[str] | None = None) -> int:
    device = current_device()
    options = parse(arguments, device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # tensors are so small that more threads only wait for each other
    if options.cell is not None:
        print(json.dumps(outcome(options.cell, options)))
        return 0
    results = all_cells(options, device)
    print_report(results)
    return 1 if own_failures(results) else 0


if __name__ == "__main__":
    sys.exit(main())
