"""The activation benchmark's tables and targets."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common import MIB, print_errors, print_rows
from benchmarks.targets import Verdict, formatted, ratio

# Of `QUANTITIES`. `tokens` restricts a target to one length.
PLANNED = [f"ours auto {percent} %" for percent in (10, 20, 35)]
TARGETS: list[dict[str, Any]] = [
    *({"mode": mode, "quantity": "peak / budget", "at_most": 1.03} for mode in PLANNED),
    *({"mode": mode, "quantity": "error of predicted step", "at_most": 0.05} for mode in PLANNED),
    {"mode": "ours inputs", "quantity": "step / checkpointing", "at_most": 1.01},
    {"mode": "ours auto 20 %", "quantity": "overhead / checkpointing's", "at_most": 0.5, "tokens": 8192},
    {"mode": "ours auto 20 %", "quantity": "overhead / checkpointing's", "at_most": 0.25, "tokens": 32768},
    {"mode": "ours auto 20 %", "quantity": "step / TRL", "at_most": 1.0},
    {"mode": "ours auto 20 %", "quantity": "saved / TRL", "at_most": 1.0},
    *({"mode": mode, "quantity": "host allocations after step 2", "at_most": 0} for mode in ("ours inputs", *PLANNED)),
]

Cell = dict[str, Any]
Cells = dict[str, Cell]


def print_report(results: dict[str, Any]) -> None:
    cells = results["cells"]
    if not cells:
        return
    print(
        f"{cells[0]['size']} Qwen3-8B-shaped layers, {cells[0]['layers']} of them, bfloat16, "
        f"{results['hardware']['name']}, {_link(results['link_gb_per_s'])}"
    )
    for num_tokens in dict.fromkeys(cell["num_tokens"] for cell in cells):
        by_mode = {cell["mode"]: cell for cell in cells if cell["num_tokens"] == num_tokens}
        saved = next((cell["saved_bytes"] for cell in by_mode.values() if "saved_bytes" in cell), None)
        print(f"\n{num_tokens} tokens, {formatted(ratio(saved, MIB), '{:.1f}')} MiB saved by autograd")
        print_rows([_row(mode, by_mode) for mode in by_mode])
        print_errors(by_mode)
        for verdict in _verdicts(results["targets"], num_tokens, by_mode):
            print(verdict)
    if results["hardware"]["device"] == "cpu":
        print(
            "\nNo accelerator: step times and device memory were not measured; saved bytes are the offloader's count."
        )


def _verdicts(targets: list[dict[str, Any]], num_tokens: int, cells: Cells) -> Iterator[Verdict]:
    for target in targets:
        if target["mode"] in cells and target.get("tokens", num_tokens) == num_tokens:
            value = QUANTITIES[target["quantity"]](cells[target["mode"]], cells)
            yield Verdict(f"{target['mode']}, {target['quantity']}", value, target["at_most"])


def _link(gb_per_s: dict[str, float] | None) -> str:
    if gb_per_s is None:
        return "no link"
    return f"link {gb_per_s['to_host']:.0f} GB/s to the host, {gb_per_s['to_device']:.0f} GB/s to the device"


def _row(mode: str, cells: Cells) -> dict[str, str]:
    cell = cells[mode]
    saved = saved_peak_bytes(cell)
    return {
        "mode": mode,
        "step ms": formatted(_step_ms(cell), "{:.1f}"),
        "/ none": formatted(_step_over("none")(cell, cells), "{:.2f}"),
        "tokens/s": formatted(cell.get("tokens_per_s"), "{:,.0f}"),
        "saved GiB": formatted(ratio(saved, 2**30), "{:.3g}"),
        "/ all": formatted(ratio(saved, cell.get("saved_bytes")), "{:.3f}"),
        "peak GiB": formatted(ratio(cell.get("peak_bytes"), 2**30), "{:.2f}"),
        "reserved": formatted(ratio(cell.get("reserved_bytes"), 2**30), "{:.2f}"),
        "predicted": _predicted(cell),
        "stall ms": formatted(cell.get("stall_ms"), "{:.1f}"),
        "first s": formatted(cell.get("first_step_s") if "step_ms" in cell else None, "{:.1f}"),
        "host GiB": formatted(ratio(cell.get("host_bytes"), 2**30), "{:.3g}"),
        "gradients": {True: "equal", False: "different", None: "-"}[cell.get("gradients_equal")],
    }


def saved_peak_bytes(cell: Cell) -> int | None:
    """Return the device's peak of saved activations; without one this library's own count, None for other modes."""
    if "peak_over_start_bytes" in cell:
        return int(cell["peak_over_start_bytes"] - cell["temporary_bytes"])
    counted = cell.get("offloader_peak_gib")
    return None if counted is None else round(counted * 2**30)


def _predicted(cell: Cell) -> str:
    step, peak = cell.get("predicted_step_ms"), cell.get("predicted_peak_gib")
    if step is None or peak is None:
        return "-"
    return f"{step:.1f} ms {peak:.3g} GiB" if "step_ms" in cell else f"{peak:.3g} GiB"


def _prediction_error(cell: Cell, cells: Cells) -> float | None:
    found = ratio(cell.get("predicted_step_ms"), _step_ms(cell))
    return None if found is None else abs(found - 1)


def _overhead_over_checkpointing(cell: Cell, cells: Cells) -> float | None:
    theirs, plain = (_step_ms(cells.get(name, {})) for name in ("checkpointing", "none"))
    ours = _step_ms(cell)
    return None if ours is None or theirs is None or plain is None else (ours - plain) / (theirs - plain)


def _step_over(other: str) -> Callable[[Cell, Cells], float | None]:
    return lambda cell, cells: ratio(_step_ms(cell), _step_ms(cells.get(other, {})))


QUANTITIES: dict[str, Callable[[Cell, Cells], float | None]] = {
    "peak / budget": lambda cell, cells: ratio(saved_peak_bytes(cell), cell.get("budget_bytes")),
    "error of predicted step": _prediction_error,
    "step / checkpointing": _step_over("checkpointing"),
    "overhead / checkpointing's": _overhead_over_checkpointing,
    "step / TRL": _step_over("TRL"),
    "saved / TRL": lambda cell, cells: ratio(saved_peak_bytes(cell), saved_peak_bytes(cells.get("TRL", {}))),
    "host allocations after step 2": lambda cell, cells: cell.get("late_host_allocations"),
}


def _step_ms(cell: Cell) -> float | None:
    return cell["step_ms"]["median"] if "step_ms" in cell else None
