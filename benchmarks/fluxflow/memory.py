"""Peak memory and growth of FluxFlow's: plain, with the seed's LPIPS checkpointing, and with our levers.

    python -m benchmarks.fluxflow.memory

At 512 x 512 each variant runs once without a limit, where peaks and times are compared, the plain one first and last;
then on a card of 8 GB, emulated by a limit on torch's allocator, with growing batches. Then 2,000 steps at changing
resolutions, with the default allocator, with its cache emptied at every 16th step, and with expandable segments: how
much memory grows. The limit emulates a card's capacity, not its speed. Each cell has a process of its own. Without an
accelerator a toy runs on the CPU, and only gradients are reported.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import UNFINISHED, Cell, Report, Row, own_failures, run_cells
from benchmarks.common import MIB, current_device, print_table, results_path
from benchmarks.fluxflow.cell import AGAIN, VARIANTS
from benchmarks.fluxflow.cell import measure as measure
from benchmarks.targets import Verdict, formatted, ratio

OURS = ("ours", "ours checkpointed", "ours offloaded")
# `fitting`: how many of ours run that batch on that card, at least.
TARGETS = {"card_gb": 8, "batch_size": 3, "fitting": 1, "peak_of_seed": 0.8, "time_of_seed": 1.05, "growth": 0.001}
# After how many steps the cache is emptied, and the environment that the allocator reads.
ALLOCATORS: dict[str, tuple[int, dict[str, str]]] = {
    "default": (0, {}),
    "empty_cache every 16": (16, {}),
    "expandable segments": (0, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
}
NORM_TOLERANCE = 1e-2  # of gradients' norms, between variants that sum in another order with bfloat16 and TF32
STEP_HEADER = [
    "variant",
    "card GB",
    "batch",
    "peak MiB",
    "reserved",
    "retries",
    "step ms",
    "first s",
    "gradient norm",
    "gradients",
]
GROWTH_HEADER = ["allocator", "steps", "ms/step", "reserved-allocated MiB", "growth", "retries"]


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """First what the targets need."""
    shared = {"size": options.size, "lpips": not options.no_lpips, "bf16": options.bf16, "warmup_steps": 2}
    step = {**shared, "part": "step", "resolution": options.resolution, "steps": options.steps}
    step["seconds_per_cell"] = options.seconds_per_cell
    again = [AGAIN] if "plain" in options.variants else []
    batch_sizes = list(dict.fromkeys(options.batch_sizes))
    compared = batch_sizes[-2:][0]
    places = [(None, compared, [*options.variants, *again])]
    places += [(card_gb, size, options.variants) for card_gb in options.cards for size in batch_sizes]
    for card_gb, batch_size, variants in places:
        card = "" if card_gb is None else f", {card_gb:g} GB"
        for variant in variants:
            what = {"variant": variant, "card_gb": card_gb, "batch_size": batch_size}
            yield Cell("fluxflow.memory", f"{variant}, batch {batch_size}{card}", {**step, **what})
    for name in options.allocators:
        empty_cache_every, environ = ALLOCATORS[name]
        settings = {
            **shared,
            "part": "growth",
            "variant": "ours",
            "allocator": name,
            "size": options.growth_size,
            "card_gb": None,
            "batch_size": 2,
            "resolution": options.growth_resolution,
            "scales": [1.0, 0.75, 0.5],
            "steps": options.growth_steps,
            "seconds_per_cell": options.growth_seconds,
            "empty_cache_every": empty_cache_every,
        }
        yield Cell("fluxflow.memory", f"growth, {name}", settings, environ=environ)


def judge(rows: list[Row]) -> None:
    """Compare gradients' norms with the plain run's of the same batch; where that does not fit, with the first."""
    for row in (row for row in rows if "grad_norm" in row):
        same = [other for other in rows if "grad_norm" in other and other["batch_size"] == row["batch_size"]]
        reference = next((other for other in same if other["variant"] == "plain"), same[0])["grad_norm"]
        row["gradients_equal"] = abs(row["grad_norm"] - reference) <= NORM_TOLERANCE * reference


def print_report(results: dict[str, Any]) -> None:
    """A row for each cell, why some failed, and the targets."""
    rows = results["cells"]
    print()
    print_table(STEP_HEADER, [_step_row(row) for row in rows if row["part"] == "step"])
    grown = [row for row in rows if row["part"] == "growth"]
    if grown:
        print()
        print_table(GROWTH_HEADER, [_growth_row(row) for row in grown])
    print()
    for error in dict.fromkeys(row["error"].partition("\n")[0] for row in rows if "error" in row):
        print(error)
    if results["hardware"]["device"] == "cpu":
        print("No accelerator: step times and device memory were not measured")
        return
    for verdict in verdicts(results):
        print(verdict)


def _step_row(row: Row) -> list[str]:
    peak = row["error"].partition(":")[0] if "error" in row else formatted(ratio(row.get("peak_bytes"), MIB), "{:,.0f}")
    return [
        row["variant"],
        formatted(row["card_gb"], "{:g}"),
        str(row["batch_size"]),
        peak,
        formatted(ratio(row.get("reserved_bytes"), MIB), "{:,.0f}"),
        formatted(row.get("num_alloc_retries"), "{}"),
        formatted(_step_ms(row), "{:.1f}"),
        formatted(row.get("first_step_s"), "{:.1f}"),
        formatted(row.get("grad_norm"), "{:.5g}"),
        {True: "equal", False: "different", None: "-"}[row.get("gradients_equal")],
    ]


def _growth_row(row: Row) -> list[str]:
    last = row.get("last") or {}
    idle = last["reserved_bytes"] - last["allocated_bytes"] if last else None
    return [
        row["allocator"],
        str(row.get("num_steps", "-")),
        row["error"].partition(":")[0] if "error" in row else formatted(row.get("ms_per_step"), "{:.1f}"),
        "-" if idle is None else f"{idle / MIB:,.0f}",
        formatted(growth_of(row), "{:.3%}"),
        formatted(last.get("num_alloc_retries"), "{}"),
    ]


def growth_of(row: Row) -> float | None:
    """Of allocated memory between steps, as a share of what was allocated early; None if there were too few."""
    if not row.get("first") or not row.get("last"):
        return None
    first, last = (row[name]["allocated_bytes"] for name in ("first", "last"))
    return float((last - first) / first)


def verdicts(results: dict[str, Any]) -> Iterator[Verdict]:
    """Each target, with what was measured."""
    targets, rows = results["targets"], results["cells"]
    steps = [row for row in rows if row["part"] == "step"]
    place = targets["card_gb"], targets["batch_size"]
    on_card = [row for row in steps if row["variant"] in OURS and (row["card_gb"], row["batch_size"]) == place]
    tried = [row for row in on_card if not row.get("error", "").startswith(UNFINISHED)]
    fitting = sum("error" not in row for row in tried) if tried else None
    what = f"batch {targets['batch_size']} on {targets['card_gb']} GB, variants of ours that fit"
    yield Verdict(what, fitting, targets["fitting"], at_least=True)
    free = {row["variant"]: row for row in steps if row["card_gb"] is None}
    seed = free.get("seed", {})
    for variant in (variant for variant in OURS if variant in free):
        peak = ratio(free[variant].get("peak_bytes"), seed.get("peak_bytes"))
        yield Verdict(f"{variant}, peak / seed", peak, targets["peak_of_seed"])
        yield Verdict(
            f"{variant}, step / seed", ratio(_step_ms(free[variant]), _step_ms(seed)), targets["time_of_seed"]
        )
    for row in (row for row in rows if row["part"] == "growth"):
        yield Verdict(f"growth over {row['steps']} steps, {row['allocator']}", growth_of(row), targets["growth"])


def _step_ms(row: Row) -> float | None:
    return row["step_ms"]["median"] if "step_ms" in row else None


REPORT = Report(TARGETS, judge, print_report, verdicts)


def parse(arguments: list[str] | None, device: torch.device) -> argparse.Namespace:
    """The command line's options; defaults depend on whether there is an accelerator."""
    on_cpu = device.type == "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", default="toy" if on_cpu else "real", help="of the model: real, small or toy (here: %(default)s)")
    add("--resolution", type=int, default=16 if on_cpu else 512, help="here: %(default)s")
    add(
        "--batch-sizes",
        nargs="+",
        type=int,
        default=[2] if on_cpu else [2, 3, 4],
        help="on the cards; the last but one, or the only one, also without (here: %(default)s)",
    )
    add("--cards", nargs="*", type=float, default=[] if on_cpu else [8], help="in GB (here: %(default)s)")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    add("--allocators", nargs="*", choices=ALLOCATORS, default=[] if on_cpu else list(ALLOCATORS), help="default: all")
    add("--bf16", action="store_true", help="autocast to bfloat16")
    add("--no-lpips", action="store_true", help="without LPIPS")
    add("--steps", type=int, default=5, help="timed steps of each cell, at most (default: %(default)s)")
    add("--seconds-per-cell", type=float, default=10.0, help="stop timing a cell after this (default: %(default)s)")
    add("--growth-size", default="small", help="of the model (default: %(default)s)")
    add("--growth-resolution", type=int, default=128, help="the largest of three (default: %(default)s)")
    add("--growth-steps", type=int, default=2000, help="default: %(default)s")
    add("--growth-seconds", type=float, default=90.0, help="stop after this (default: %(default)s)")
    add("--time-limit-s", type=float, default=510.0, help="of the whole run (default: %(default)s)")
    add("--output", type=Path, help="JSON file (default: in benchmarks/results)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    device = current_device()
    options = parse(arguments, device)
    output = options.output or results_path(f"fluxflow-memory-{options.size}", device)
    results = run_cells("fluxflow.memory", list(cells(options)), output, time_limit_s=options.time_limit_s)
    return 1 if own_failures(results["cells"], lambda row: True) else 0


if __name__ == "__main__":
    sys.exit(main())
