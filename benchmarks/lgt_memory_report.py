"""Table and verdicts of `lgt_memory.py`."""

from collections.abc import Iterator
from typing import Any

from common import print_table

# What the guide that this recipe comes from says of its card of 8 GB.
CLAIMS = {(240, 5): "6.8 GB, near the limit", (240, 10): "out of memory", (32, 10): "about 5.2 GB"}


def print_report(results: dict[str, Any]) -> None:
    """The table, and what it says of the guide's figures and of the target."""
    header = ["batch x Euler steps, mode", "peak GiB", "step ms", "samples/s", "moved GiB/step", "first loss"]
    print_table(header, [_row(cell) for cell in results["cells"]])
    if results["hardware"]["device"] == "cpu":
        print("No accelerator: step times and device memory were not measured.")
        return
    print()
    for line in verdicts(results):
        print(line)


def verdicts(results: dict[str, Any]) -> Iterator[str]:
    """One line for each claim, and the target: batch 240 x 10 steps as fast as accumulating batches of 32."""
    cells = results["cells"]
    single = [cell for cell in cells if cell["num_accumulated"] == 1]
    for (batch_size, num_steps), claim in CLAIMS.items():
        measured = [c for c in single if (c["batch_size"], c["num_steps"]) == (batch_size, num_steps)]
        found = ", ".join(f"{cell['mode']} {_peak(cell)}" for cell in measured) or "not measured"
        yield f"batch {batch_size} x {num_steps} steps, claimed {claim}: {found}"
    yield _target(cells)


def _target(cells: list[dict[str, Any]]) -> str:
    title = "batch 240 x 10 steps against batch 32 x 10 accumulated twice, samples/s"
    remedy = next((cell for cell in cells if cell["num_accumulated"] > 1), {})
    large = [cell for cell in cells if (cell["batch_size"], cell["num_steps"]) == (240, 10) and "samples_per_s" in cell]
    if "samples_per_s" not in remedy:
        return f"{title}: not measured"
    if not large:
        return f"{title}: target missed, nothing fits"
    best = max(large, key=lambda cell: cell["samples_per_s"])
    ratio = best["samples_per_s"] / remedy["samples_per_s"]
    return f"{title}: {ratio:.2f}, {best['mode']} (target 1: {'met' if ratio >= 1 else 'missed'})"


def _row(cell: dict[str, Any]) -> list[str]:
    accumulated = f" accumulated {cell['num_accumulated']} times" if cell["num_accumulated"] > 1 else ""
    name = f"{cell['batch_size']} x {cell['num_steps']}{accumulated}, {cell['mode']}"
    if "error" in cell:
        return [name, _peak(cell), "-", "-", "-", "-"]
    step_ms, moved = cell.get("step_ms"), cell.get("moved_bytes")
    return [
        name,
        _peak(cell),
        "-" if step_ms is None else f"{step_ms['median']:.1f}",
        "-" if step_ms is None else f"{cell['samples_per_s']:.1f}",
        "-" if moved is None else f"{moved / 2**30:.3f}",
        f"{cell['losses'][0]:.6f}",
    ]


def _peak(cell: dict[str, Any]) -> str:
    if "error" in cell:
        return "does not fit" if cell["error"].startswith("OutOfMemoryError") else "failed"
    return f"{cell['peak_bytes'] / 2**30:.2f} GiB" if "peak_bytes" in cell else "-"
