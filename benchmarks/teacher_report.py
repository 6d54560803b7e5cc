"""The teacher benchmark's table and its targets."""

from typing import Any

from common import MIB, print_table

# A mode's quantity over another mode's, at most this.
TARGETS = [
    {"mode": "swap", "over": "resident", "quantity": "step_ms", "at_most": 1.02},
    {"mode": "stream", "over": "resident", "quantity": "step_ms", "at_most": 1.02},
    {"mode": "stream", "over": "seed", "quantity": "step_ms", "at_most": 1.0},
    {"mode": "swap+shared", "over": "seed", "quantity": "step_ms", "at_most": 0.6},
    {"mode": "swap+shared", "over": "seed", "quantity": "peak_bytes", "at_most": 0.5},
]
HEADER = ["mode", "step ms", "/ resident", "peak GiB", "/ seed", "to device MiB", "to host MiB", "target", "loss"]


def print_report(results: dict[str, Any]) -> None:
    """One table per dtype and batch size, each followed by its targets."""
    groups = sorted({(cell["dtype"], cell["batch_size"]) for cell in results["cells"]})
    for dtype, batch_size in groups:
        cells = {c["mode"]: c for c in results["cells"] if (c["dtype"], c["batch_size"]) == (dtype, batch_size)}
        print(f"\n{results['size']} SmolVLA, {dtype}, batch {batch_size}, {results['hardware']['name']}")
        print_table(HEADER, [_row(mode, cells) for mode in cells])
        for mode, cell in cells.items():
            if "error" in cell:
                print(f"{mode}: {cell['error'].splitlines()[0]}")
        for target in TARGETS:
            if target["mode"] in cells:
                print(_verdict(target, cells))
    if results["hardware"]["device"] == "cpu":
        print("\nNo accelerator: step times, peaks and copies of other libraries were not measured.")


def _row(mode: str, cells: dict[str, Any]) -> list[str]:
    moved = _moved(cells[mode].get("traffic_bytes", {}))
    peak = _quantity(cells, mode, "peak_bytes")
    return [
        mode,
        _format(_quantity(cells, mode, "step_ms"), "{:.1f}"),
        _format(_ratio(cells, mode, "resident", "step_ms"), "{:.2f}"),
        _format(None if peak is None else peak / 2**30, "{:.2f}"),
        _format(_ratio(cells, mode, "seed", "peak_bytes"), "{:.2f}"),
        *(_format(None if way not in moved else moved[way] / MIB, "{:.1f}") for way in _DIRECTIONS),
        _likeness(cells[mode], "target_equal", "target_max_difference"),
        _likeness(cells[mode], "loss_equal", "loss_difference"),
    ]


_DIRECTIONS = ("host_to_device", "device_to_host")


def _moved(traffic: dict[str, Any]) -> dict[str, int]:
    measured = (traffic[source] for source in ("profiler", "copier", "computed") if source in traffic)
    return next(measured, {})


def _verdict(target: dict[str, Any], cells: dict[str, Any]) -> str:
    what = f"{target['mode']} / {target['over']}, {target['quantity']}: "
    ratio = _ratio(cells, target["mode"], target["over"], target["quantity"])
    if ratio is None:
        return f"{what}not measured (target {target['at_most']})"
    return f"{what}{ratio:.3f} (target {target['at_most']}: {'met' if ratio <= target['at_most'] else 'missed'})"


def _ratio(cells: dict[str, Any], mode: str, other: str, quantity: str) -> float | None:
    ours, theirs = _quantity(cells, mode, quantity), _quantity(cells, other, quantity)
    return None if ours is None or theirs is None else ours / theirs


def _quantity(cells: dict[str, Any], mode: str, quantity: str) -> float | None:
    cell = cells.get(mode, {})
    if quantity == "step_ms":
        return cell["step_ms"]["median"] if "step_ms" in cell else None
    return max(cell.get("peak_device_bytes", {}).values(), default=None)


def _likeness(cell: dict[str, Any], equal: str, difference: str) -> str:
    if equal not in cell:
        return "-"
    return "equal" if cell[equal] else f"{cell[difference]:.1e}"


def _format(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
