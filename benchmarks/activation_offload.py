"""Training steps of Qwen3-8B-shaped layers with activations kept, computed again, or moved to the host.

    python benchmarks/activation_offload.py

A step is forward and backward of one sequence in bfloat16; there is no optimizer, because it would only add the same to
every mode. Links of half and a quarter of this machine's speed are emulated by making each copy two and four times.
Without an accelerator toy layers run on the CPU, and only gradients, bytes and plans are reported: neither times nor
device memory mean anything there. See docs/benchmarks.md for the columns.
"""

import argparse
import os
import sys
import time as clock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from activation_model import (
    SIZES,
    Saved,
    Work,
    build_model,
    deterministic,
    gradient_digest,
    saved_by_all_layers,
    temporary_bytes,
)
from activation_modes import MODES, ON_SLOWER_LINKS, OURS, Handling, Setting, UnavailableError
from activation_report import TARGETS, print_report
from common import (
    current_device,
    environment,
    free_memory,
    host_rss_bytes,
    median_and_spread,
    results_path,
    step_times_ms,
    write_results,
)
from torch import nn

from hf_memopt.transfer.host_memory import pinned_empty

MAX_PASSES_TO_SETTLE = 8
LINK_PROBE_BYTES = 2**28
Digest = list[tuple[int, int]]


def measure(handling: Handling, work: Work, setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one mode, its gradients' digest under `"digest"`."""
    host_allocations: list[int] = []

    def step() -> None:
        work.step(handling.context)
        stats = handling.stats()
        host_allocations.append(0 if stats is None else stats.num_host_allocations)

    settle(handling, step, options.warmup)
    found = timing(handling, step, setting, options) if setting.device.type != "cpu" else {}
    with deterministic():
        work.clear()
        step()
    return {
        "digest": gradient_digest(work.model),
        "budget_bytes": handling.budget_bytes,
        **found,
        **account(handling, host_allocations),
        "host_rss_bytes": host_rss_bytes(),
    }


def settle(handling: Handling, step: Callable[[], None], num_passes: int) -> None:
    """Untimed passes; where the mode makes a plan, until two passes have followed it."""
    for _ in range(num_passes):
        step()
    for _ in range(MAX_PASSES_TO_SETTLE if handling.is_planned else 0):
        stats = handling.stats()
        if stats is not None and stats.predicted_step_ms is not None:
            step()
            step()
            return
        step()


def timing(
    handling: Handling, step: Callable[[], None], setting: Setting, options: argparse.Namespace
) -> dict[str, Any]:
    """Step times, peaks over what is allocated between steps, and for how long compute waited for copies."""
    before, stats = torch.accelerator.memory_allocated(setting.device), handling.stats()
    torch.accelerator.reset_peak_memory_stats(setting.device)
    times = step_times_ms(step, setting.device, max_steps=options.steps, max_seconds=options.seconds_per_cell)
    peak = torch.accelerator.max_memory_allocated(setting.device)
    found: dict[str, Any] = {
        "step_ms": {**median_and_spread(times), "num_steps": len(times)},
        "peak_bytes": peak,
        "peak_over_weights_bytes": peak - before,
    }
    after = handling.stats()
    if stats is not None and after is not None:
        found["stall_ms"] = (after.stall_ms - stats.stall_ms) / len(times)
        found["moved_bytes"] = (after.bytes_moved - stats.bytes_moved) // len(times)
    return found


def account(handling: Handling, host_allocations: list[int]) -> dict[str, Any]:
    """What this library's offloader says of itself."""
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


def reset(model: nn.Module, device: torch.device) -> None:
    """Undo what the last mode has done to the model, and give its memory back, on the host too."""
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()
    model.zero_grad(set_to_none=False)
    free_memory(device)
    if device.type == "cuda":
        torch._C._host_emptyCache()  # pinned blocks that torch keeps for later


def host_memory_gib() -> float:
    """What this process may use: the machine's, or less where a control group says so."""
    limit = Path("/sys/fs/cgroup/memory.max")
    given = limit.read_text().strip() if limit.exists() else "max"
    total = psutil.virtual_memory().total
    return min(total, total if given == "max" else int(given)) / 2**30


def link_gb_per_s(device: torch.device) -> dict[str, float] | None:
    """What the link carries each way; None on the CPU."""
    if device.type == "cpu":
        return None
    host, there = (
        pinned_empty(LINK_PROBE_BYTES, device),
        torch.empty(LINK_PROBE_BYTES, dtype=torch.uint8, device=device),
    )
    copies = {"to_device": (there, host), "to_host": (host, there)}
    found = {}
    for way, (destination, source) in copies.items():
        times = step_times_ms(
            lambda to=destination, of=source: to.copy_(of, non_blocking=True), device, max_steps=5, max_seconds=5
        )
        found[way] = LINK_PROBE_BYTES / 1e6 / median_and_spread(times)["median"]
    return found


class Run:
    """Measures one cell after the other and rewrites the results file after each."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._begun = clock.perf_counter()
        self._options = options
        self._device = device
        self._model = build_model(options.size, options.layers, device)
        self._saved: dict[int, Saved] = {}
        self._references: dict[int, Digest] = {}
        self._output = options.output or results_path(f"activation-offload-{options.size}", device)
        self.results: dict[str, Any] = {
            **environment(device),
            "benchmark": "activation_offload",
            "size": options.size,
            "shape": SIZES[options.size],
            "num_layers": options.layers,
            "num_parameters": sum(p.numel() for p in self._model.parameters()),
            "dtype": "bfloat16",
            "link_gb_per_s": link_gb_per_s(device),
            "targets": TARGETS,
            "workloads": [],
            "cells": [],
            "complete": False,
        }

    def all_cells(self) -> dict[str, Any]:
        """Every mode at every length, then this library's on slower links."""
        for num_tokens in self._options.tokens:
            self._prepare(num_tokens)
        for divisor in self._options.link_divisors:
            modes = [mode for mode in MODES if mode in self._options.modes]
            for num_tokens in self._options.tokens:
                for mode in modes if divisor == 1 else filter(ON_SLOWER_LINKS.__contains__, modes):
                    self._cell({"mode": mode, "num_tokens": num_tokens, "link_divisor": divisor})
        self.results["complete"] = True
        write_results(self.results, self._output)
        print("wrote", self._output)
        return self.results

    def _prepare(self, num_tokens: int) -> None:
        work = Work.make(self._model, num_tokens, self._device)
        self._saved[num_tokens] = saved_by_all_layers(work)
        self.results["workloads"].append(
            {
                "num_tokens": num_tokens,
                "saved_bytes": self._saved[num_tokens].unique_bytes,
                "temporary_bytes": temporary_bytes(work, self._device),
            }
        )

    def _cell(self, cell: dict[str, Any]) -> None:
        if clock.perf_counter() - self._begun > self._options.time_limit_s:
            self._record({**cell, "error": f"not run: --time-limit-s={self._options.time_limit_s:g} was reached"})
            return
        reset(self._model, self._device)
        try:
            self._record({**cell, **self._measured(cell)})
        except UnavailableError as error:
            self._record({**cell, "error": f"not run: {error}"})
        except Exception as error:
            # That a mode does not run, or does not fit, is a result.
            self._record({**cell, "error": f"{type(error).__name__}: {error}"})

    def _measured(self, cell: dict[str, Any]) -> dict[str, Any]:
        num_tokens = cell["num_tokens"]
        limit_bytes = round(self._options.host_limit_gib * 2**30)
        setting = Setting(self._model, self._device, self._saved[num_tokens], limit_bytes, cell["link_divisor"])
        work = Work.make(self._model, num_tokens, self._device)
        found = measure(MODES[cell["mode"]](setting), work, setting, self._options)
        digest = found.pop("digest")
        # Where not even the plain run fits, checkpointing is what gradients are compared with.
        if cell["mode"] in ("none", "checkpointing"):
            self._references.setdefault(num_tokens, digest)
        reference = self._references.get(num_tokens)
        return {**found, "gradients_equal": None if reference is None else digest == reference}

    def _record(self, cell: dict[str, Any]) -> None:
        self.results["cells"].append(cell)
        write_results(self.results, self._output)
        name = f"{cell['mode']}, {cell['num_tokens']} tokens, link 1/{cell['link_divisor']}"
        print(f"{clock.perf_counter() - self._begun:6.1f} s  {name}: {cell.get('error', 'done')[:200]}", flush=True)


def own_failures(results: dict[str, Any]) -> list[dict[str, Any]]:
    """This library's cells that failed for another reason than memory or time, or whose gradients differ."""
    excused = ("OutOfMemoryError", "not run")
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
    add("--size", choices=SIZES, default="toy" if on_cpu else "real", help="of the layers (here: %(default)s)")
    add("--layers", type=int, default=8 if on_cpu else 16, help="at least 2 (here: %(default)s)")
    add("--tokens", nargs="+", type=int, default=[128] if on_cpu else [8192, 16384, 32768], help="here: %(default)s")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    add("--link-divisors", nargs="+", type=int, default=[1, 2, 4], help="emulated links (default: %(default)s)")
    add(
        "--host-limit-gib",
        type=float,
        default=round(0.7 * host_memory_gib(), 1),
        help="host memory to take (here: %(default)s)",
    )
    add("--warmup", type=int, default=2, help="untimed steps of each cell, at least 2 (default: %(default)s)")
    add("--steps", type=int, default=5, help="timed steps of each cell, at most (default: %(default)s)")
    add("--seconds-per-cell", type=float, default=8.0, help="stop timing a cell after this (default: %(default)s)")
    add("--time-limit-s", type=float, default=510.0, help="begin no cell after this (default: %(default)s)")
    add("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    options = parser.parse_args(arguments)
    if options.warmup < 2 or options.layers < 2:
        parser.error("--warmup and --layers must be at least 2")
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
