"""Training steps of an FNO on graphics cards of 8, 16 and 24 GB, emulated by a limit on torch's allocator.

    python benchmarks/neural_operator.py

A step is forward, relative L2 loss and backward in float32. Without a limit every mode is timed at 256 x 256 and 512 x
512, batch 16; then, on each card, batches at 512 x 512 grow until a mode no longer fits. The limit emulates a card's
capacity, not its speed or its link. Without an accelerator a toy FNO runs on the CPU, and only gradients and bytes are
reported: neither times nor device memory mean anything there.
"""

import argparse
import os
import sys
import time as clock
from pathlib import Path
from typing import Any

import torch
from activation_model import deterministic, saved_by
from activation_modes import UnavailableError
from activation_offload import host_memory_gib, link_gb_per_s
from common import (
    USABLE_SHARE,
    current_device,
    environment,
    free_memory,
    limit_memory,
    median_and_spread,
    results_path,
    step_times_ms,
    usable_bytes,
    write_results,
)
from neural_operator_modes import MODES, OURS, SIZES, Handling, Setting, Work, build_model
from neural_operator_report import TARGETS, print_report
from torch import Tensor

TEMPORARIES_MARGIN = 1.1
WARMUP_STEPS = 4  # after them "ours auto" follows its plan


class Run:
    """Measures one cell after the other and rewrites the results file after each."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._begun = clock.perf_counter()
        self._options = options
        self._device = device
        self._model = build_model(options.size, device)
        self._references: dict[tuple[int, int], list[Tensor]] = {}
        self._output = options.output or results_path(f"neural-operator-{options.size}", device)
        self.results: dict[str, Any] = {
            **environment(device),
            "benchmark": "neural_operator",
            "size": options.size,
            "model": SIZES[options.size],
            "num_parameters": sum(p.numel() for p in self._model.parameters()),
            "usable_share_of_card": USABLE_SHARE,
            "link_gb_per_s": link_gb_per_s(device),
            "targets": TARGETS,
            "cells": [],
            "complete": False,
        }

    def all_cells(self) -> dict[str, Any]:
        """Without a card, then on each card from the smallest batch on."""
        options = self._options
        for nodes in options.nodes:
            for mode in options.modes:
                self._cell({"card_gb": None, "nodes": nodes, "batch_size": options.batch_size, "mode": mode})
        for card_gb in options.cards:
            for mode in options.modes:
                self._climb(card_gb, mode)
        self.results["complete"] = True
        write_results(self.results, self._output)
        return self.results

    def _climb(self, card_gb: float, mode: str) -> None:
        for batch_size in self._options.batch_sizes:
            cell = {"card_gb": card_gb, "nodes": self._options.nodes[-1], "batch_size": batch_size, "mode": mode}
            if not self._cell(cell):
                return

    def _cell(self, cell: dict[str, Any]) -> bool:
        """Whether it ran; that a mode does not run, or does not fit, is a result."""
        limit_s = self._options.time_limit_s
        free_memory(self._device)
        if self._device.type == "cuda":
            torch._C._host_emptyCache()  # pinned blocks that torch keeps for later
        try:
            if clock.perf_counter() - self._begun > limit_s:
                raise UnavailableError(f"--time-limit-s={limit_s:g} was reached")
            found = self._measured(cell)
        except UnavailableError as error:
            found = {"error": f"not run: {error}"}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        finally:
            limit_memory(None)
        self.results["cells"].append({**cell, **found})
        write_results(self.results, self._output)
        name = ", ".join(f"{value}" for value in cell.values())
        print(f"{clock.perf_counter() - self._begun:6.1f} s  {name}: {found.get('error', 'done')[:200]}", flush=True)
        return "error" not in found

    def _measured(self, cell: dict[str, Any]) -> dict[str, Any]:
        nodes, batch_size = cell["nodes"], cell["batch_size"]
        setting = self._setting(nodes, batch_size, cell["card_gb"])
        limit_memory(cell["card_gb"])
        with MODES[cell["mode"]](setting) as handling:
            work = Work.make(self._model, nodes, batch_size, self._device)
            for _ in range(WARMUP_STEPS):
                work.step(handling.context)
            found = self._timed(work, handling)
            with deterministic():
                work.step(handling.context)
        gradients = [parameter.grad.cpu() for parameter in self._model.parameters()]
        # Where not even the plain run fits, checkpointing is what gradients are compared with.
        reference = self._references.get((nodes, batch_size))
        if reference is None and cell["mode"] in ("plain", "checkpointing"):
            reference = self._references.setdefault((nodes, batch_size), [gradient.clone() for gradient in gradients])
        equal = None if reference is None else all(map(torch.equal, gradients, reference))
        return {"saved_bytes": setting.saved_bytes, **found, "gradients_equal": equal}

    def _timed(self, work: Work, handling: Handling) -> dict[str, Any]:
        before, found = handling.stats(), {}
        if self._device.type == "cpu":
            work.step(handling.context)
            num_steps = 1
        else:
            torch.accelerator.reset_peak_memory_stats(self._device)
            limits = {"max_steps": self._options.steps, "max_seconds": self._options.seconds_per_cell}
            times = step_times_ms(lambda: work.step(handling.context), self._device, **limits)
            num_steps = len(times)
            found["step_ms"] = {**median_and_spread(times), "num_steps": num_steps}
            found["peak_bytes"] = torch.accelerator.max_memory_allocated(self._device)
        after = handling.stats()
        if before is not None and after is not None:
            found |= {
                "moved_bytes": (after.bytes_moved - before.bytes_moved) // num_steps,
                "stall_ms": (after.stall_ms - before.stall_ms) / num_steps,
                "budget_bytes": handling.budget_bytes,
                "predicted_peak_gib": after.predicted_peak_gib,
                "offloader_peak_gib": after.measured_peak_gib,
            }
        return found

    def _setting(self, nodes: int, batch_size: int, card_gb: float | None) -> Setting:
        """Bytes of one sample, times the batch: everything that is saved or temporary has a batch dimension."""
        sample = Work.make(self._model, nodes, 1, self._device)
        saved = saved_by(sample)
        room = None
        if card_gb is not None:
            temporary = TEMPORARIES_MARGIN * batch_size * self._temporary_bytes(sample, saved.unique_bytes)
            room = round(usable_bytes(card_gb) - torch.accelerator.memory_allocated(self._device) - temporary)
        return Setting(
            self._model,
            self._device,
            saved.unique_bytes * batch_size,
            saved.views_pinned_bytes * batch_size,
            round(self._options.host_limit_gib * 2**30),
            room,
        )

    def _temporary_bytes(self, work: Work, saved_bytes: int) -> int:
        """By how much the peak of a plain step exceeds weights, gradients, data and saved activations."""
        before = torch.accelerator.memory_allocated(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        with MODES["plain"](None) as handling:
            work.step(handling.context)
        return int(torch.accelerator.max_memory_allocated(self._device) - before - saved_bytes)


def own_failures(results: dict[str, Any]) -> list[dict[str, Any]]:
    """This library's cells that failed for another reason than memory or time, or whose gradients differ."""
    excused = ("OutOfMemoryError", "InfeasibleBudgetError", "not run")
    return [
        cell
        for cell in results["cells"]
        if cell["mode"] in OURS
        and not cell.get("error", "").startswith(excused)
        and ("error" in cell or cell["gradients_equal"] is False)
    ]


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
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    add("--host-limit-gib", type=float, default=round(0.7 * host_memory_gib(), 1), help="here: %(default)s")
    add("--steps", type=int, default=5, help="timed steps of each cell, at most (default: %(default)s)")
    add("--seconds-per-cell", type=float, default=5.0, help="stop timing a cell after this (default: %(default)s)")
    add("--time-limit-s", type=float, default=510.0, help="begin no cell after this (default: %(default)s)")
    add("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    options = parser.parse_args(arguments)
    if on_cpu and options.cards:
        parser.error("--cards needs an accelerator: there is no device memory to limit on a CPU")
    return options


def main(arguments: list[str] | None = None) -> int:
    # Deterministic matrix products need it before the first of them; it asks for the workspace that Hopper has anyway.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = current_device()
    options = parse(arguments, device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # tensors are so small that more threads only wait for each other
    results = Run(options, device).all_cells()
    print_report(results)
    return 1 if own_failures(results) else 0


if __name__ == "__main__":
    sys.exit(main())
