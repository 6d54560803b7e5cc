"""A whole SmolVLA reflow training step, with the teacher's weights handled in several ways.

    python benchmarks/teacher_offload.py

A step is the teacher's target (10 Euler steps), the student's forward and backward, clipping and AdamW. On an
accelerator SmolVLA has its published size and random weights. Without one the toy runs instead, and only bytes and
equality are reported: neither times nor device memory mean anything there. See docs/benchmarks.md for the columns.
"""

import argparse
import sys
import tempfile
import time as clock
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import (
    PhasePeaks,
    copied_bytes,
    current_device,
    environment,
    free_memory,
    host_rss_bytes,
    median_and_spread,
    pinned_bytes,
    results_path,
    step_times_ms,
    write_results,
)
from smolvla import SIZES, Size, build_policy, draw_noise_and_time, make_batch, observe
from teacher_modes import MODES, OTHER_LIBRARIES, Batch, Handling, Source, on_links
from teacher_report import TARGETS, print_report
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_GRAD_NORM = 10.0  # lerobot's default for SmolVLA
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Workload:
    """One batch, its noise and times, and the optimizer of a student at its start."""

    batch: Batch
    noise: Tensor
    time: Tensor
    autocast: torch.autocast
    optimizer: torch.optim.Optimizer
    peaks: PhasePeaks


@dataclass(frozen=True)
class Answer:
    """What a mode computed in its first step, on the host."""

    target: Tensor
    loss: float


def training_step(handling: Handling, work: Workload) -> float:
    """One optimizer step, in the order of lerobot's training loop. Reading the loss waits for the device, as there."""
    work.peaks.start()
    with work.autocast:
        loss = handling.loss(work.batch, work.noise, work.time, work.peaks)
        value = loss.item()
    loss.backward()
    work.peaks.mark("backward")
    nn.utils.clip_grad_norm_(handling.student.parameters(), MAX_GRAD_NORM)
    work.optimizer.step()
    work.optimizer.zero_grad()
    work.peaks.mark("optimizer")
    handling.student.update()
    return value


def prepare(handling: Handling, source: Source, size: Size, batch_size: int) -> Workload:
    """Put the student back to its start and make the batch."""
    starts = dict(source.policy.named_parameters())
    trained = {name: p for name, p in handling.student.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(starts[name])
    noise, time = draw_noise_and_time(handling.student, batch_size, source.device)
    return Workload(
        make_batch(size, batch_size, source.device),
        noise,
        time,
        torch.autocast(source.device.type, torch.bfloat16, enabled=source.dtype == torch.bfloat16),
        torch.optim.AdamW(trained.values(), lr=LEARNING_RATE),
        PhasePeaks(source.device),
    )


def measure(handling: Handling, work: Workload, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one mode, dtype and batch size, and its answer under `"answer"`."""
    with work.autocast:
        target = handling.target(observe(handling.student, work.batch), work.noise).float().cpu()

    def step() -> float:
        return training_step(handling, work)

    answer = Answer(target, step())
    for _ in range(options.warmup - 1):
        step()
    work.peaks.peak_bytes.clear()
    report = handling.report()
    return {
        "answer": answer,
        **(timing(handling, step, device, options) if device.type != "cpu" else {}),
        "peak_device_bytes": dict(work.peaks.peak_bytes),
        "host_rss_bytes": host_rss_bytes(),
        "pinned_by_torch_bytes": pinned_bytes(device),
        "teacher_host_bytes": None if report is None else report.host_bytes,
        "teacher_peak_device_bytes": None if report is None else report.peak_device_bytes,
        "teacher_predicted_device_bytes": None if report is None else report.predicted_device_bytes,
    }


def traffic(handling: Handling, work: Workload, device: torch.device) -> dict[str, Any]:
    """Bytes over the host link in one step: by CUDA's trace, by the copier's count, and as known beforehand."""

    def step() -> float:
        return training_step(handling, work)

    before = handling.report()
    found: dict[str, Any] = {}
    if device.type == "cuda":
        found["profiler"] = copied_bytes(step)
    else:
        step()
    after = handling.report()
    if before is not None and after is not None:
        found["copier"] = {
            "host_to_device": after.bytes_host_to_device - before.bytes_host_to_device,
            "device_to_host": after.bytes_device_to_host - before.bytes_device_to_host,
        }
    if handling.moved_bytes is not None:
        found["computed"] = {"host_to_device": handling.moved_bytes, "device_to_host": handling.moved_bytes}
    return found


def timing(
    handling: Handling, step: Callable[[], float], device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Step times, and for how long compute waited for the teacher's weights in a step."""
    before = handling.report()
    times = step_times_ms(step, device, max_steps=options.steps, max_seconds=options.seconds_per_cell)
    after = handling.report()
    found: dict[str, Any] = {"step_ms": {**median_and_spread(times), "num_steps": len(times)}}
    if before is not None and after is not None:
        found["stall_ms"] = (after.stall_ms - before.stall_ms) / len(times)
    return found


def compare(answer: Answer, reference: Answer | None) -> dict[str, Any]:
    """Target and loss against the resident teacher's."""
    if reference is None:
        return {"loss": answer.loss}
    return {
        "loss": answer.loss,
        "loss_equal": answer.loss == reference.loss,
        "loss_difference": abs(answer.loss - reference.loss),
        "target_equal": torch.equal(answer.target, reference.target),
        "target_max_difference": (answer.target - reference.target).abs().max().item(),
    }


class Run:
    """Measures one cell after the other and rewrites the results file after each."""

    def __init__(self, options: argparse.Namespace, device: torch.device, folder: Path) -> None:
        self._begun = clock.perf_counter()
        self._options = options
        self._device = device
        self._size = SIZES[options.size]
        chosen = {mode: make for mode, make in MODES.items() if mode in options.modes}
        self._modes = chosen | on_links(options.modes, options.links)
        self._policy = build_policy(self._size, folder)
        self._checkpoint = folder / "teacher"
        self._policy.save_pretrained(self._checkpoint)
        self._references: dict[tuple[str, int], Answer] = {}
        self._output = options.output or results_path(f"teacher-offload-{options.size}", device)
        self.results: dict[str, Any] = {
            **environment(device),
            "benchmark": "teacher_offload",
            "size": options.size,
            "num_parameters": sum(p.numel() for p in self._policy.parameters()),
            "warmup": options.warmup,
            "targets": TARGETS,
            "complete": False,
            "cells": [],
        }

    def all_cells(self) -> dict[str, Any]:
        """The whole benchmark: modes outermost, so that running out of time costs the last modes."""
        for mode in self._modes:
            for dtype in self._options.dtypes:
                self._cells_of(mode, dtype)
                free_memory(self._device)
        self.results["complete"] = True
        write_results(self.results, self._output)
        print("wrote", self._output)
        return self.results

    def _cells_of(self, mode: str, dtype: str) -> None:
        source = Source(self._policy, self._checkpoint, self._device, DTYPES[dtype])
        handling: Handling | None = None
        moved: dict[str, Any] | None = None
        for batch_size in self._options.batch_sizes:
            free_memory(self._device)
            cell = {"mode": mode, "dtype": dtype, "batch_size": batch_size}
            if clock.perf_counter() - self._begun > self._options.time_limit_s:
                self._record({**cell, "error": f"not run: --time-limit-s={self._options.time_limit_s:g} was reached"})
                continue
            try:
                handling = handling or self._modes[mode](source)
                found = self._measure(handling, source, cell, moved)
                moved = found["traffic_bytes"]
                self._record({**cell, **found})
            except Exception as error:
                # That a mode does not run, or does not fit, is a result. It may have left its teacher half moved.
                handling = None
                self._record({**cell, "error": f"{type(error).__name__}: {error}"})

    def _measure(
        self, handling: Handling, source: Source, cell: dict[str, Any], moved: dict[str, Any] | None
    ) -> dict[str, Any]:
        work = prepare(handling, source, self._size, cell["batch_size"])
        found = self._judge(cell, measure(handling, work, self._device, self._options))
        # Weights travel and activations do not, so that one batch size speaks for all.
        moved = moved or {"at_batch_size": cell["batch_size"], **traffic(handling, work, self._device)}
        return {**found, "traffic_bytes": moved}

    def _judge(self, cell: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        key = (cell["dtype"], cell["batch_size"])
        answer = found.pop("answer")
        if cell["mode"] == "resident":
            self._references[key] = answer
        return {**found, **compare(answer, self._references.get(key))}

    def _record(self, cell: dict[str, Any]) -> None:
        self.results["cells"].append(cell)
        write_results(self.results, self._output)
        name = f"{cell['mode']}, {cell['dtype']}, batch {cell['batch_size']}"
        print(f"{clock.perf_counter() - self._begun:6.1f} s  {name}: {cell.get('error', 'done')[:200]}", flush=True)


def own_failures(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells that should have run: not another library's, not short of memory or time."""
    return [
        cell
        for cell in results["cells"]
        if "error" in cell
        and cell["mode"] not in OTHER_LIBRARIES
        and not cell["error"].startswith(("OutOfMemoryError", "not run"))
    ]


def parse(arguments: list[str] | None, device: torch.device) -> argparse.Namespace:
    """The command line's options; defaults depend on whether there is an accelerator."""
    on_cpu = device.type == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=SIZES, default="toy" if on_cpu else "real", help="which SmolVLA (here: %(default)s)")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    add("--batch-sizes", nargs="+", type=int, default=[8] if on_cpu else [1, 8, 32, 64], help="here: %(default)s")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the teacher's weights; default: both")
    add(
        "--links",
        nargs="*",
        type=float,
        default=[] if on_cpu else [12, 25, 50],
        help="GB/s, emulated (here: %(default)s)",
    )
    add("--warmup", type=int, default=2, help="untimed steps of each cell, at least 1 (default: %(default)s)")
    add("--steps", type=int, default=20, help="timed steps of each cell, at most (default: %(default)s)")
    add("--seconds-per-cell", type=float, default=2.0, help="stop timing a cell after this (default: %(default)s)")
    add("--time-limit-s", type=float, default=510.0, help="begin no cell after this (default: %(default)s)")
    add("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    device = current_device()
    options = parse(arguments, device)
    if device.type == "cpu" and options.size == "toy":
        torch.set_num_threads(1)  # its tensors are so small that more threads only wait for each other
    with tempfile.TemporaryDirectory() as folder:
        results = Run(options, device, Path(folder)).all_cells()
    print_report(results)
    return 1 if own_failures(results) else 0


if __name__ == "__main__":
    sys.exit(main())
