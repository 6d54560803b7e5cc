"""Training steps of the LGT recipe's model on a graphics card of 8 GB, emulated by a limit on torch's allocator.

    python -m benchmarks.lgt.memory

Batches of 32, 96 and 240 latents, 5 and 10 Euler steps with gradients, plain, checkpointed, offloaded and as planned
for the card that runs with so much memory, in bfloat16; and batches of 32 accumulated twice, with which throughput is
compared at equal samples. Each cell runs in a process of its own, and the plain run of the first size once more at the
end. Losses are compared after the timed steps, from the start again and with deterministic kernels. The limit emulates
a card's capacity, not its speed or its link. Without an accelerator a toy model runs on the CPU, where neither times
nor device memory mean anything.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from benchmarks.activations.model import deterministically
from benchmarks.cells import Cell, Report, Row, UnavailableError, compare, own_failures, run_cells
from benchmarks.common import current_device, limit_memory, results_path, usable_bytes
from benchmarks.lgt.report import TARGETS, name_of, print_report, verdicts
from benchmarks.timing import first_step_s, timed
from hf_memopt import ActivationOffloader, SyncCopier, plan
from hf_memopt.estimate.gpus import CARDS, Card, allowances, card_named, find_card
from hf_memopt.estimate.simulation.child_process import run_isolated
from hf_memopt.recipes.lgt.data import make_batch
from hf_memopt.recipes.lgt.options import Options, make_options
from hf_memopt.recipes.lgt.step import Objective, build_model, build_optimizer
from hf_memopt.recipes.lgt.workload import LatentTransferWorkload
from hf_memopt.training import train_step

NUM_COMPARED = 2  # steps, so that the second loss follows from the first gradient
CARD_GB = 8

# Fields of the configuration, and options of the offloader where there is one.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "plain": ({}, None),
    "checkpointed": ({"training.use_gradient_checkpointing": True}, None),
    "offloaded": ({}, {"mode": "all", "offload_threshold_mb": 1.0}),
    "planned": ({}, None),  # fields and micro-batch as `plan` finds them for the emulated card
}
AGAIN = "plain again"  # at the end: how far two runs of the same differ
TOY = {"model.base_channels": 8, "model.style_dim": 8, "model.time_dim": 8, "data.latent_size": 8}
SIZES: dict[str, dict[str, Any]] = {"real": {}, "toy": TOY}
REMEDY = {"batch_size": 32, "num_steps": 10, "mode": "plain", "num_accumulated": 2}


def measure(settings: dict[str, Any], folder: Path) -> Row:
    """Steps of one cell: on an accelerator time, throughput and peak memory; then the losses of the first ones.

    Raises:
        torch.OutOfMemoryError: it does not fit the card.
        UnavailableError: nothing is known of the card that runs, and this cell wants a plan for it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first matrix product
    config, offloading = settle(settings)  # a plan forks, which has to come before anything here touches CUDA
    accelerator = Accelerator(mixed_precision="bf16")
    device = accelerator.device
    if device.type == "cpu":
        torch.set_num_threads(1)  # tensors are so small that more threads only wait for each other
    limit_memory(settings["card_gb"])
    torch.manual_seed(0)
    model = build_model(config).to(device)
    initial = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    model, optimizer = accelerator.prepare(model, build_optimizer(config, model))
    micro_batches = [make_batch(config, device) for _ in range(config.training.accumulation_steps)]
    objective = Objective(config)
    offloader = None
    if offloading is not None:
        offloader = ActivationOffloader(**offloading, copier=SyncCopier() if device.type == "cpu" else None)
        offloader.wrap(model)

    def step() -> float:
        norm = config.training.max_grad_norm
        return train_step(accelerator, model, objective, micro_batches, optimizer, max_grad_norm=norm).loss

    found: Row = {"first_step_s": first_step_s(step, device)}
    step()
    found |= timed(step, device, max_steps=settings["steps"], max_seconds=settings["seconds_per_cell"])
    if "step_ms" in found:
        num_samples = settings["batch_size"] * settings["num_accumulated"]
        found["samples_per_s"] = 1e3 * num_samples / found["step_ms"]["median"]
    model.load_state_dict(initial)
    optimizer.state.clear()
    torch.manual_seed(1)
    moved_before = 0 if offloader is None else offloader.stats.bytes_moved
    found |= deterministically(lambda: {"losses": [step() for _ in range(NUM_COMPARED)]})
    if offloader is not None:
        found["moved_bytes"] = (offloader.stats.bytes_moved - moved_before) // NUM_COMPARED
    return found


def settle(settings: dict[str, Any]) -> tuple[Options, dict[str, Any] | None]:
    """Configuration and options of the offloader; those of a plan in mode "planned"."""
    mode = "plain" if settings["mode"] == AGAIN else settings["mode"]
    fields, offloading = MODES[mode]
    sizes = {"training.batch_size": settings["batch_size"], "training.ode_integration_steps": settings["num_steps"]}
    sizes["training.accumulation_steps"] = settings["num_accumulated"]
    config = make_options({**SIZES[settings["size"]], **sizes, **fields})
    if mode == "planned":
        workload = LatentTransferWorkload(config, precision="bf16")
        best = plan(workload, gpu=emulated_card(run_isolated(present_gpu), settings["card_gb"]), progress=False).best
        config = workload.with_settings(best.settings, best.micro_batch)
        offloading = {"mode": config.offload.offload} if config.offload.offload != "off" else None
    return config, offloading


def present_gpu() -> str | None:
    """Its driver's name for the GPU that runs, if there is one. Starts CUDA."""
    device = current_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def emulated_card(gpu: str | None, card_gb: float | None) -> Card:
    """The card that runs with the memory of the emulated one; without a GPU, any small card.

    Raises:
        UnavailableError: the GPU is none of the cards that plans are made for.
    """
    card = find_card(f"{CARD_GB}GiB") if gpu is None else card_named(gpu)
    if card is None:
        raise UnavailableError(f"{gpu!r} is none of the cards to plan for: {', '.join(CARDS)}")
    return replace(card, memory_bytes=usable_bytes(card_gb or CARD_GB) + sum(allowances(card).values()))


def judge(rows: list[Row]) -> None:
    """Compare losses with those of the plain run of the same size; where that does not fit, with checkpointing's."""
    work = ["batch_size", "num_steps", "num_accumulated"]
    compare(rows, "losses", "losses_equal", work, ["plain", "checkpointed"])


REPORT = Report(TARGETS, judge, print_report, verdicts)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """The accumulating cell first: throughput is compared with it."""
    shared = {name: getattr(options, name) for name in ("size", "card_gb", "steps", "seconds_per_cell")}
    remedy = REMEDY if options.size == "real" else {**REMEDY, "batch_size": 2, "num_steps": 2}
    product = list(itertools.product(options.batch_sizes, options.euler_steps))
    sizes = [
        {"batch_size": batch_size, "num_steps": num_steps, "num_accumulated": 1} for batch_size, num_steps in product
    ]
    measured = [{**size, "mode": mode} for size in sizes for mode in options.modes]
    again = [{**sizes[0], "mode": AGAIN}] if "plain" in options.modes else []
    for what in [remedy, *measured, *again]:
        yield Cell("lgt.memory", name_of(what), {**what, **shared})


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
    options = parser.parse_args(arguments)
    if on_cpu and options.card_gb is not None:
        parser.error("--card-gb needs an accelerator: there is no device memory to limit on a CPU")
    return options


def main(arguments: list[str] | None = None) -> int:
    device = current_device()
    options = parse(arguments, device)
    output = options.output or results_path(f"lgt-memory-{options.size}", device)
    results = run_cells("lgt.memory", list(cells(options)), output, time_limit_s=options.time_limit_s)
    rows = results["cells"]
    different = [row for row in rows if row.get("losses_equal") is False]
    return 1 if different or own_failures(rows, lambda row: True) else 0


if __name__ == "__main__":
    sys.exit(main())
