"""The teacher benchmark's tables and targets."""

from collections.abc import Iterator
from typing import Any

from benchmarks.common import MIB, print_errors, print_rows
from benchmarks.targets import Verdict, formatted, ratio

# Upper limits of a mode's quantity over another mode's.
TARGETS: list[dict[str, Any]] = [
    {"mode": "swap", "over": "resident", "quantity": "step_ms", "at_most": 1.02},
    {"mode": "stream", "over": "resident", "quantity": "step_ms", "at_most": 1.02},
    {"mode": "stream", "over": "seed", "quantity": "step_ms", "at_most": 1.0},
    {"mode": "swap+shared", "over": "seed", "quantity": "step_ms", "at_most": 0.6},
    {"mode": "swap+shared", "over": "seed", "quantity": "peak_bytes", "at_most": 0.5},
]

Cell = dict[str, Any]
Cells = dict[str, Cell]


def print_report(results: dict[str, Any]) -> None:
    for dtype, batch_size, cells in _groups(results["cells"]):
        size = results["size"] if "size" in results else next(iter(cells.values()))["size"]
        print(f"\n{size} SmolVLA, {dtype}, batch {batch_size}, {results['hardware']['name']}")
        print_rows([_row(name, cells) for name in cells])
        print_errors(cells)
        for verdict in _verdicts(results["targets"], cells):
            print(verdict)
    if results["hardware"]["device"] == "cpu":
        print("\nNo accelerator: step times, peaks and copies of other libraries were not measured.")


def _groups(cells: list[Cell]) -> Iterator[tuple[str, int, Cells]]:
    for dtype, batch_size in sorted({(cell["dtype"], cell["batch_size"]) for cell in cells}):
        here = [cell for cell in cells if (cell["dtype"], cell["batch_size"]) == (dtype, batch_size)]
        yield dtype, batch_size, {cell["mode"]: cell for cell in here}


def _verdicts(targets: list[dict[str, Any]], cells: Cells) -> Iterator[Verdict]:
    for target in targets:
        if target["mode"] in cells:
            what = f"{target['mode']} / {target['over']}, {target['quantity']}"
            yield Verdict(what, _over(cells, target["mode"], target["over"], target["quantity"]), target["at_most"])


def _row(name: str, cells: Cells) -> dict[str, str]:
    cell = cells[name]
    moved = _moved(cell.get("traffic_bytes", {}))
    return {
        "mode": name,
        "step ms": formatted(_quantity(cell, "step_ms"), "{:.1f}"),
        "/ resident": formatted(_over(cells, name, "resident", "step_ms"), "{:.2f}"),
        "samples/s": formatted(cell.get("samples_per_s"), "{:.1f}"),
        "peak GiB": formatted(ratio(cell.get("peak_bytes"), 2**30), "{:.2f}"),
        "/ seed": formatted(_over(cells, name, "seed", "peak_bytes"), "{:.2f}"),
        "reserved": formatted(ratio(cell.get("reserved_bytes"), 2**30), "{:.2f}"),
        "stall ms": formatted(cell.get("stall_ms"), "{:.1f}"),
        "first s": formatted(cell.get("first_step_s") if "step_ms" in cell else None, "{:.1f}"),
        "to device MiB": formatted(ratio(moved.get("host_to_device"), MIB), "{:.1f}"),
        "to host MiB": formatted(ratio(moved.get("device_to_host"), MIB), "{:.1f}"),
        "target": _likeness(cell, "target_equal", "target_max_difference"),
        "loss": _likeness(cell, "loss_equal", "loss_difference"),
    }


def _moved(traffic: dict[str, Any]) -> dict[str, int]:
    measured = (traffic[source] for source in ("profiler", "copier", "computed") if source in traffic)
    return next(measured, {})


def _over(cells: Cells, name: str, other: str, quantity: str) -> float | None:
    return ratio(_quantity(cells[name], quantity), _quantity(cells.get(other, {}), quantity))


def _quantity(cell: Cell, quantity: str) -> float | None:
    found = cell.get(quantity)
    return found["median"] if isinstance(found, dict) else found


def _likeness(cell: Cell, equal: str, difference: str) -> str:
    if equal not in cell:
        return "-"
    return "equal" if cell[equal] else f"{cell[difference]:.1e}"
