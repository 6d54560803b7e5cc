"""The table and targets of the benchmark of estimates."""

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.cells import Row
from benchmarks.common import MIB, print_table
from benchmarks.targets import Verdict, formatted, ratio

HEADER = [
    "step",
    "estimated MiB",
    "measured",
    "deviation",
    "estimated reserved",
    "reserved",
    "deviation",
    "estimated ms",
    "ms",
    "first s",
    "attention",
]
# Upper limits of the relative deviation of allocated bytes.
TARGETS = {"worst_deviation": 0.05, "median_deviation": 0.03}
QUANTITIES = {
    "deviation": "allocated bytes",
    "reserved_deviation": "reserved bytes",
    "step_deviation": "time of a step",
}


def print_report(results: dict[str, Any]) -> None:
    rows = results["cells"]
    print(f"{results['hardware']['name']}, estimates for {', '.join(dict.fromkeys(row['card'] for row in rows))}\n")
    print_table(HEADER, [_columns(row) for row in rows])
    for row in rows:
        if "error" in row:
            print(f"{_name(row)}: {row['error'].splitlines()[0]}")
        if "same_bytes" in row:
            print(f"{_name(row)}: {'the same bytes' if row['same_bytes'] else 'other bytes than the first time'}")
    if results["hardware"]["device"] == "cpu":
        print("\nNo accelerator: nothing was measured.")
    for quantity, what in QUANTITIES.items():
        worst, median = summary(rows, quantity)
        print(f"{what}: deviation {formatted(worst, '{:.2%}')} at worst, {formatted(median, '{:.2%}')} in the median")
    for verdict in verdicts(results):
        print(verdict)


def verdicts(results: dict[str, Any]) -> Iterator[Verdict]:
    for name, value in zip(TARGETS, summary(results["cells"], "deviation"), strict=True):
        yield Verdict(f"{name.replace('_', ' ')} of allocated bytes", value, results["targets"][name])


def summary(rows: list[Row], quantity: str) -> tuple[float | None, float | None]:
    """Return worst and median absolute deviation, without the repeated cell; None if nothing was measured."""
    found = [abs(row[quantity]) for row in rows if quantity in row and not row["again"]]
    return (max(found), statistics.median(found)) if found else (None, None)


def _columns(row: Row) -> list[str]:
    estimate = row.get("estimate") or {}
    return [
        _name(row),
        _mib(estimate.get("allocated_bytes")),
        _mib(row.get("measured_allocated_bytes")),
        formatted(row.get("deviation"), "{:+.2%}"),
        _mib(estimate.get("reserved_bytes")),
        _mib(row.get("measured_reserved_bytes")),
        formatted(row.get("reserved_deviation"), "{:+.2%}"),
        formatted(estimate.get("step_ms"), "{:.1f}"),
        formatted(row["step_ms"]["median"] if "step_ms" in row else None, "{:.1f}"),
        formatted(row.get("first_step_s"), "{:.1f}"),
        next(iter(row.get("attention_order", [])), "-").removesuffix("_ATTENTION").lower(),
    ]


def _name(row: Row) -> str:
    return row["step"] + (", cuDNN attention last" if row["cudnn_last"] else "") + (" again" if row["again"] else "")


def _mib(num_bytes: float | None) -> str:
    return formatted(ratio(num_bytes, MIB), "{:,.1f}")
