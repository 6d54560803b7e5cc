"""When clearing the allocator's cache matters: a convolutional network on images of changing sizes, three ways.

    python benchmarks/cache_clearing.py

The allocator as it is; the same with the cache emptied every 16 steps; expandable segments. Each runs in a process of
its own, since the allocator reads its settings once. Needs a CUDA device; without one there is nothing to measure, and
it says so. Takes about a minute.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    current_device,
    environment,
    median_and_spread,
    print_table,
    results_path,
    step_times_ms,
    write_results,
)
from torch import nn

SIZES = range(256, 641, 32)  # pixels
EVERY = 16
VARIANTS: dict[str, dict[str, str]] = {
    "default": {},
    "empty_cache": {},
    "expandable_segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}
HEADER = ["allocator", "step ms", "/ default", "allocated GiB", "reserved GiB", "lost GiB", "retries"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.variant:
        print(json.dumps(measure(options.variant, options.steps)))
        return 0
    device = current_device()
    results: dict[str, Any] = {"benchmark": "cache_clearing", **environment(device), "steps": options.steps, "rows": {}}
    if device.type != "cuda":
        print("No CUDA device: its caching allocator is what is measured here.")
        return 1
    for variant, settings in VARIANTS.items():
        command = [sys.executable, __file__, "--variant", variant, "--steps", str(options.steps)]
        child = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
        results["rows"][variant] = json.loads(child.stdout.splitlines()[-1])
    print_report(results)
    write_results(results, options.output or results_path("cache-clearing", device))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="per variant (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure(variant: str, num_steps: int, device: torch.device | None = None) -> dict[str, Any]:
    """Train for `num_steps`; memory as it is after each, the second half counted."""
    device = device or torch.device("cuda")
    torch.manual_seed(0)
    sizes = random.Random(0)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        size = sizes.choice(SIZES)
        image = torch.randn(4, 3, size, size, device=device)
        (model(image) - image).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    times, readings = [], []
    for number in range(num_steps):
        times += step_times_ms(step, device, max_steps=1, max_seconds=60, min_steps=1)
        readings.append(reading(device))
        if variant == "empty_cache" and number % EVERY == EVERY - 1:
            torch.accelerator.empty_cache()
    half = readings[num_steps // 2 :]
    return {
        "step_ms": median_and_spread(times[num_steps // 2 :]),
        "mean_step_ms": sum(times[num_steps // 2 :]) / len(half),
        "peak_allocated_bytes": max(entry["peak"] for entry in half),
        "reserved_bytes": max(entry["reserved"] for entry in half),
        "num_alloc_retries": half[-1]["retries"],
    }


def make_model() -> nn.Module:
    """An autoencoder as large as a small VAE."""
    widths = [3, 64, 128, 256]
    down = [nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in itertools.pairwise(widths)]
    up = [nn.ConvTranspose2d(b, a, 4, stride=2, padding=1) for a, b in itertools.pairwise(widths)][::-1]
    return nn.Sequential(*(layer for convolution in (*down, *up) for layer in (convolution, nn.SiLU())))


def reading(device: torch.device) -> dict[str, int]:
    """The allocator's books after a step; nothing on the CPU."""
    if device.type == "cpu":
        return dict.fromkeys(("peak", "reserved", "retries"), 0)
    stats = torch.accelerator.memory_stats(device)
    return {
        "peak": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.current"],
        "retries": stats["num_alloc_retries"],
    }


def print_report(results: dict[str, Any]) -> None:
    """The table; `lost` is reserved at most over allocated at most."""
    default = results["rows"]["default"]["mean_step_ms"]
    rows = []
    for name, row in results["rows"].items():
        allocated, reserved = row["peak_allocated_bytes"] / 2**30, row["reserved_bytes"] / 2**30
        time = row["mean_step_ms"]
        figures = [f"{time:.1f}", f"{time / default:.2f}", f"{allocated:.2f}", f"{reserved:.2f}"]
        rows.append([name, *figures, f"{reserved - allocated:.2f}", str(row["num_alloc_retries"])])
    print_table(HEADER, rows)


if __name__ == "__main__":
    raise SystemExit(main())
