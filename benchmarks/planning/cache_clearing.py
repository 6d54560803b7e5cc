"""Effect of clearing the allocator's cache, for a convolutional network on images of changing sizes.

    python -m benchmarks.planning.cache_clearing

Variants are the default allocator, first and last; the same with its cache emptied every 16 steps; and expandable
segments. Times are those of 16 steps, emptying included. Each variant runs in a process of its own, since the allocator
reads its settings once. It needs a CUDA device, and takes about a minute.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.cells import Cell, Report, Row, run_cells
from benchmarks.common import BenchmarkParser, current_device, print_errors, print_table, results_path
from benchmarks.targets import Verdict, formatted, ratio
from benchmarks.timing import first_step_s, timed

SIZES = range(256, 641, 32)  # pixels
EVERY = 16
# The environment that the allocator reads when CUDA starts.
VARIANTS: dict[str, dict[str, str]] = {
    "default": {},
    "empty_cache": {},
    "expandable_segments": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "default again": {},
}
# Claims of docs/memory.md: growing segments lose no more memory than fixed ones; emptying makes nothing faster.
TARGETS = {"expandable_segments, lost / default": 1.0, "empty_cache, time / default": 1.0}
HEADER = ["allocator", "16 steps ms", "/ default", "allocated GiB", "reserved GiB", "lost GiB", "retries", "first s"]


def measure(settings: dict[str, Any], folder: Path) -> Row:
    device = current_device()
    torch.manual_seed(0)
    sizes = random.Random(0)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_round() -> None:
        for _ in range(EVERY):
            size = sizes.choice(SIZES)
            image = torch.randn(4, 3, size, size, device=device)
            (model(image) - image).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if settings["variant"] == "empty_cache":
            torch.accelerator.empty_cache()

    found: Row = {"first_step_s": first_step_s(train_round, device)}
    num_rounds = max(2, settings["steps"] // EVERY)
    for _ in range(num_rounds // 2 - 1):
        train_round()
    num_timed = num_rounds - num_rounds // 2
    return found | timed(train_round, device, max_steps=num_timed, max_seconds=settings["seconds_per_cell"])


def make_model() -> nn.Module:
    widths = [3, 64, 128, 256]
    down = [nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in itertools.pairwise(widths)]
    up = [nn.ConvTranspose2d(b, a, 4, stride=2, padding=1) for a, b in itertools.pairwise(widths)][::-1]
    return nn.Sequential(*(layer for convolution in (*down, *up) for layer in (convolution, nn.SiLU())))


def judge(rows: list[Row]) -> None:
    """Add lost bytes (peak reserved less peak allocated) and times over the default's."""
    default = next((row["step_ms"]["median"] for row in rows if row["variant"] == "default" and "step_ms" in row), None)
    for row in (row for row in rows if "step_ms" in row):
        row["lost_bytes"] = row["reserved_bytes"] - row["peak_bytes"]
        row["time_over_default"] = ratio(row["step_ms"]["median"], default)


def print_report(results: dict[str, Any]) -> None:
    rows = results["cells"]
    print_table(HEADER, [_row(row) for row in rows])
    print_errors({row["variant"]: row for row in rows})
    for verdict in verdicts(results):
        print(verdict)


def _row(row: Row) -> list[str]:
    return [
        row["variant"],
        formatted(row["step_ms"]["median"] if "step_ms" in row else None, "{:.1f}"),
        formatted(row.get("time_over_default"), "{:.2f}"),
        *(formatted(ratio(row.get(name), 2**30), "{:.2f}") for name in ("peak_bytes", "reserved_bytes", "lost_bytes")),
        formatted(row.get("num_alloc_retries"), "{}"),
        formatted(row.get("first_step_s"), "{:.1f}"),
    ]


def verdicts(results: dict[str, Any]) -> Iterator[Verdict]:
    rows = {row["variant"]: row for row in results["cells"]}
    of_default, of_growing = (rows.get(name, {}).get("lost_bytes") for name in ("default", "expandable_segments"))
    emptied = rows.get("empty_cache", {}).get("time_over_default")
    lost, slower = TARGETS
    yield Verdict(lost, ratio(of_growing, of_default), results["targets"][lost])
    yield Verdict(slower, emptied, results["targets"][slower], at_least=True)


REPORT = Report(TARGETS, print_report, judge)


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    shared = {"steps": options.steps, "seconds_per_cell": options.seconds_per_cell}
    for variant, environ in VARIANTS.items():
        yield Cell("planning.cache_clearing", variant, {"variant": variant, **shared}, environ=environ)


def main(arguments: Sequence[str] | None = None) -> int:
    device = current_device()
    parser = BenchmarkParser(__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=384, help="of each variant; the second half is timed (default: %(default)s)")
    add("--seconds-per-cell", type=float, default=60.0, help="stop timing a variant after this (default: %(default)s)")
    add("--time-limit-s", type=float, default=510.0, help="of the whole run (default: %(default)s)")
    options = parser.options(arguments)
    if device.type != "cuda":
        print("No CUDA device: its caching allocator is what is measured here.")
        return 1
    output = options.output or results_path("cache-clearing", device)
    return run_cells("planning.cache_clearing", list(cells(options)), output, time_limit_s=options.time_limit_s)


if __name__ == "__main__":
    sys.exit(main())
