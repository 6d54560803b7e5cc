"""LoRA steps of a model of Qwen3-8B's shape, whose frozen weights are on the device or visit it.

    python -m benchmarks.streamed_weights

A step is forward and backward of one sequence in bfloat16, with checkpointed layers and a loss in chunks. The adapters'
optimizer would add the same few MB to every mode. Each mode runs in a process of its own. Files lie in the system's
folder for temporary ones. Without an accelerator a toy model runs on the CPU, and only gradients and bytes are
reported.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.activations.lora import LoraWork, build
from benchmarks.activations.model import SIZES, compared, flash_attention, prepared_device
from benchmarks.cells import Cell, Report, Row, compare, run_cells
from benchmarks.common import BenchmarkParser, current_device, host_rss_bytes, print_errors, print_table, results_path
from benchmarks.targets import formatted, ratio
from benchmarks.timing import first_step_s, timed
from hf_memopt import StreamedWeights
from hf_memopt.units import GIB

# Homes of the frozen weights, and the device memory for them beside what their visits need.
MODES: dict[str, tuple[str, float | None] | None] = {
    "resident": None,
    "host": ("host", None),
    "host, 4 GiB stay": ("host", 4.0),
    "file": ("file", None),
    "file, 4 GiB stay": ("file", 4.0),
}
REFERENCE = "resident"
HEADER = ["mode", "step ms", "/ resident", "tokens/s", "peak GiB", "weights GiB", "brought", "stall ms", "first s"]
HEADER += ["host GiB", "gradients"]


def measure(settings: dict[str, Any], folder: Path) -> Row:
    device = prepared_device()
    work = build(settings["size"], settings["num_tokens"], device)
    move_adapters(work.model)
    work.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    whole = nn.ModuleList([work.model, work.head])
    kind = MODES[settings["mode"]]
    with flash_attention(device):
        if kind is None:
            return steps_of(work, work.step, settings, device)
        home, stays_gib = kind
        visits = 2 * work.head.weight.nbytes / GIB  # the largest visit, and as much fetched ahead
        budget_gib = None if stays_gib is None else stays_gib + visits
        base = StreamedWeights(whole, home=home, device=device, budget_gib=budget_gib, files=(), disk=folder)
        row = steps_of(work, lambda: work.step(base.stream), settings, device, base)
        report = base.report()
        return {**row, "weights_peak_bytes": report.peak_device_bytes, "home_bytes": report.host_bytes}


def move_adapters(model: nn.Module) -> None:
    """Move weights that begin as zeros, which would have others' gradients be zeros."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.01 * torch.randn_like(parameter))


def steps_of(
    work: LoraWork,
    step: Callable[[], None],
    settings: dict[str, Any],
    device: torch.device,
    base: StreamedWeights | None = None,
) -> Row:
    found: Row = {"first_step_s": first_step_s(step, device)}
    for _ in range(settings["warmup"] - 1):
        step()
    before = None if base is None else base.report()
    found |= timed(step, device, max_steps=settings["steps"], max_seconds=settings["seconds_per_cell"])
    if "step_ms" in found:
        found["tokens_per_s"] = 1e3 * settings["num_tokens"] / found["step_ms"]["median"]
    if base is not None and before is not None and "step_ms" in found:
        num_steps, after = found["step_ms"]["num_steps"], base.report()
        found["stall_ms"] = (after.stall_ms - before.stall_ms) / num_steps
        found["brought_bytes"] = (after.bytes_to_device - before.bytes_to_device) // num_steps
    work.model.zero_grad()
    return {**found, **compared(step, work.model), "host_rss_bytes": host_rss_bytes()}


def judge(rows: list[Row]) -> None:
    compare(rows, "gradient_digest", "gradients_equal", ["num_tokens"], [REFERENCE])


def print_report(results: dict[str, Any]) -> None:
    rows = results["cells"]
    if rows:
        print(f"{rows[0]['size']} model of Qwen3-8B's shape, LoRA, bfloat16, {results['hardware']['name']}")
    for num_tokens in dict.fromkeys(row["num_tokens"] for row in rows):
        by_mode = {row["mode"]: row for row in rows if row["num_tokens"] == num_tokens}
        print(f"\n{num_tokens} tokens")
        print_table(HEADER, [_cells(mode, row, by_mode) for mode, row in by_mode.items()])
        print_errors(by_mode)


def _cells(mode: str, row: Row, by_mode: dict[str, Row]) -> list[str]:
    step_ms = row.get("step_ms", {}).get("median")
    resident_ms = by_mode.get(REFERENCE, {}).get("step_ms", {}).get("median")
    gib = [ratio(row.get(name), GIB) for name in ("peak_bytes", "weights_peak_bytes", "brought_bytes", "home_bytes")]
    return [
        mode,
        formatted(step_ms, "{:.1f}"),
        formatted(ratio(step_ms, resident_ms), "{:.2f}"),
        formatted(row.get("tokens_per_s"), "{:.0f}"),
        *(formatted(value, "{:.2f}") for value in gib[:3]),
        formatted(row.get("stall_ms"), "{:.1f}"),
        formatted(row.get("first_step_s"), "{:.1f}"),
        formatted(gib[3], "{:.2f}"),
        {True: "equal", False: "DIFFERENT", None: "-"}[row.get("gradients_equal")],
    ]


REPORT = Report({}, print_report, judge, is_ours=lambda row: row["mode"] != REFERENCE)


def main(arguments: list[str] | None = None) -> int:
    device = current_device()
    on_cpu = device.type == "cpu"
    parser = BenchmarkParser(__doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="toy" if on_cpu else "real", help="of the model (here: %(default)s)")
    add("--tokens", nargs="+", type=int, default=[128] if on_cpu else [2048, 8192], help="here: %(default)s")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    add("--warmup", type=int, default=3, help="untimed steps, of which two are learned from (default: %(default)s)")
    add("--steps", type=int, default=5, help="timed steps of each cell, at most (default: %(default)s)")
    add("--seconds-per-cell", type=float, default=10.0, help="stop timing a cell after this (default: %(default)s)")
    add("--time-limit-s", type=float, default=510.0, help="of the whole run (default: %(default)s)")
    options = parser.options(arguments)
    shared = {name: getattr(options, name) for name in ("size", "warmup", "steps", "seconds_per_cell")}
    cells = [
        Cell("streamed_weights", f"{mode}, {num_tokens} tokens", {"mode": mode, "num_tokens": num_tokens, **shared})
        for num_tokens in options.tokens
        for mode in options.modes
    ]
    output = options.output or results_path(f"streamed-weights-{options.size}", device)
    return run_cells("streamed_weights", cells, output, time_limit_s=options.time_limit_s)


if __name__ == "__main__":
    sys.exit(main())
