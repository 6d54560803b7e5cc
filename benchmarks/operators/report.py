"""What the neural operator benchmark prints: a table for each workload, the largest batches, and the targets."""

from collections.abc import Iterator
from typing import Any

from benchmarks.cells import UNFINISHED
from benchmarks.common import MIB, print_table
from benchmarks.operators.modes import OURS
from benchmarks.targets import Verdict

TARGETS = {"card_gb": 8, "nodes": 512, "batch_size": 16, "times_faster_at_equal_peak": 2.0}
EQUAL_PEAK = 1.02
HEADER = ["mode", "saved MiB", "peak MiB", "reserved MiB", "moved MiB", "step ms", "/ plain", "samples/s", "gradients"]


def print_report(results: dict[str, Any]) -> None:
    """A table for each workload without a card, the largest batches by card, and the targets."""
    cells = results["cells"]
    for nodes in sorted({cell["nodes"] for cell in cells if cell["card_gb"] is None}):
        rows = [cell for cell in cells if cell["card_gb"] is None and cell["nodes"] == nodes]
        print(f"\n{nodes} x {nodes}, batch {rows[0]['batch_size']}, no limit")
        print_table(HEADER, list(_rows(rows)))
    for card_gb in sorted({cell["card_gb"] for cell in cells if cell["card_gb"] is not None}):
        rows = [cell for cell in cells if cell["card_gb"] == card_gb]
        print(f"\nlargest batch at {rows[0]['nodes']} x {rows[0]['nodes']} on a card of {card_gb:g} GB")
        for mode in dict.fromkeys(cell["mode"] for cell in rows):
            fits = [cell["batch_size"] for cell in rows if cell["mode"] == mode and "error" not in cell]
            print(f"  {mode:14} {max(fits, default='none')}")
    print()
    if results["hardware"]["device"] == "cpu":
        print("No accelerator: step times and device memory were not measured")
        return
    for verdict in verdicts(results):
        print(verdict)


def _rows(cells: list[dict[str, Any]]) -> Iterator[list[str]]:
    reference = next((c["step_ms"]["median"] for c in cells if c["mode"] == "plain" and "step_ms" in c), None)
    for cell in cells:
        if "error" in cell:
            yield [cell["mode"], cell["error"].partition(":")[0], *["-"] * (len(HEADER) - 2)]
            continue
        step_ms = cell["step_ms"]["median"] if "step_ms" in cell else None
        ratio = step_ms / reference if step_ms and reference else None
        sizes = [_mib(cell, name) for name in ("saved_bytes", "peak_bytes", "reserved_bytes", "moved_bytes")]
        figures = [*sizes, step_ms, ratio, cell.get("samples_per_s")]
        equal = {True: "equal", False: "DIFFER", None: "-"}[cell["gradients_equal"]]
        yield [cell["mode"], *("-" if figure is None else f"{figure:,.2f}" for figure in figures), equal]


def _mib(cell: dict[str, Any], name: str) -> float | None:
    return cell[name] / MIB if name in cell else None


def verdicts(results: dict[str, Any]) -> Iterator[Verdict]:
    """Each target, with what was measured."""
    targets, cells = results["targets"], results["cells"]
    wanted = {name: targets[name] for name in ("card_gb", "nodes", "batch_size")}
    on_card = [cell for cell in cells if cell["mode"] in OURS and wanted.items() <= cell.items() and ran(cell)]
    fitting = [cell["mode"] for cell in on_card if "error" not in cell]
    where = f"{wanted['nodes']} x {wanted['nodes']}, batch {wanted['batch_size']}, on {wanted['card_gb']} GB"
    modes = f" ({', '.join(fitting)})" if fitting else ""
    yield Verdict(f"{where}, modes of ours that fit{modes}", len(fitting) if on_card else None, 1, at_least=True)
    for nodes in sorted({cell["nodes"] for cell in cells}):
        free = {c["mode"]: c for c in cells if c["card_gb"] is None and c["nodes"] == nodes and "step_ms" in c}
        yield _faster_than_the_wrapper(nodes, free, targets["times_faster_at_equal_peak"])


def ran(cell: dict[str, Any]) -> bool:
    """Whether it was tried: that it does not fit is an answer."""
    return not cell.get("error", "").startswith(UNFINISHED)


def _faster_than_the_wrapper(nodes: int, cells: dict[str, dict[str, Any]], target: float) -> Verdict:
    title = f"{nodes} x {nodes}, save_on_cpu's step / ours at no higher peak"
    if "save_on_cpu" not in cells:
        return Verdict(title, None, target, at_least=True)
    theirs = cells["save_on_cpu"]
    ours = [c for c in cells.values() if c["mode"] in OURS and c["peak_bytes"] <= EQUAL_PEAK * theirs["peak_bytes"]]
    if not ours:
        return Verdict(f"{title} (none of ours has so low a peak)", 0.0, target, at_least=True)
    best = min(ours, key=lambda cell: cell["step_ms"]["median"])
    found = theirs["step_ms"]["median"] / best["step_ms"]["median"]
    return Verdict(f"{title}, {best['mode']}", found, target, at_least=True)
