"""The activation benchmark's tables and targets."""

from collections.abc import Callable
from typing import Any

from common import MIB, print_table

HEADER = [
    "mode",
    "step ms",
    "/ none",
    "saved GiB",
    "/ all",
    "peak GiB",
    "predicted",
    "stall ms",
    "host GiB",
    "gradients",
]
# Limits of `QUANTITIES`. `tokens` limits a target to one length.
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

Cells = dict[str, dict[str, Any]]


def print_report(results: dict[str, Any]) -> None:
    """One table per length and link, each followed by the targets that apply."""
    print(
        f"{results['size']} Qwen3-8B-shaped layers, {results['num_layers']} of them, {results['dtype']}, "
        f"{results['hardware']['name']}, {_link(results['link_gb_per_s'])}"
    )
    workloads = {workload["num_tokens"]: workload for workload in results["workloads"]}
    groups = dict.fromkeys((cell["link_divisor"], cell["num_tokens"]) for cell in results["cells"])
    for divisor, num_tokens in groups:
        here = [cell for cell in results["cells"] if cell["num_tokens"] == num_tokens]
        # References know no link: they are the same on every one.
        cells = {cell["mode"]: cell for cell in here if cell["link_divisor"] in (1, divisor)}
        shown = [cell["mode"] for cell in here if cell["link_divisor"] == divisor]
        cells |= {cell["mode"]: cell for cell in here if cell["link_divisor"] == divisor}
        _print_group(divisor, workloads[num_tokens], cells, shown, results["targets"])
    if results["hardware"]["device"] == "cpu":
        print(
            "\nNo accelerator: step times and device memory were not measured; what is saved is the offloader's count."
        )


def _link(gb_per_s: dict[str, float] | None) -> str:
    if gb_per_s is None:
        return "no link"
    return f"link {gb_per_s['to_host']:.0f} GB/s to the host, {gb_per_s['to_device']:.0f} GB/s to the device"


def _print_group(
    divisor: int, workload: dict[str, Any], cells: Cells, shown: list[str], targets: list[dict[str, Any]]
) -> None:
    link = "" if divisor == 1 else f", emulated link of 1/{divisor} of the speed"
    print(f"\n{workload['num_tokens']} tokens, {workload['saved_bytes'] / MIB:.1f} MiB saved by autograd{link}")
    print_table(HEADER, [_row(mode, cells, workload) for mode in shown])
    for mode in shown:
        if "error" in cells[mode]:
            print(f"{mode}: {cells[mode]['error'].splitlines()[0]}")
    for target in targets:
        if target["mode"] in shown and target.get("tokens", workload["num_tokens"]) == workload["num_tokens"]:
            print(_verdict(target, cells, workload))


def _row(mode: str, cells: Cells, workload: dict[str, Any]) -> list[str]:
    cell = cells[mode]
    saved = saved_peak_bytes(cell, workload)
    return [
        mode,
        _format(_step_ms(cell), "{:.1f}"),
        _format(_ratio(_step_ms(cell), _step_ms(cells.get("none", {}))), "{:.3f}"),
        _format(_ratio(saved, 2**30), "{:.3g}"),
        _format(_ratio(saved, workload["saved_bytes"]), "{:.3f}"),
        _format(_ratio(cell.get("peak_bytes"), 2**30), "{:.2f}"),
        _predicted(cell),
        _format(cell.get("stall_ms"), "{:.1f}"),
        _format(_ratio(cell.get("host_bytes"), 2**30), "{:.3g}"),
        {True: "equal", False: "different", None: "-"}[cell.get("gradients_equal")],
    ]


def saved_peak_bytes(cell: dict[str, Any], workload: dict[str, Any]) -> int | None:
    """Peak of what autograd had saved on the device: without weights, gradients and temporaries.

    Without an accelerator this library's own count stands in, and other modes have none.
    """
    if "peak_over_weights_bytes" in cell:
        return int(cell["peak_over_weights_bytes"] - workload["temporary_bytes"])
    counted = cell.get("offloader_peak_gib")
    return None if counted is None else round(counted * 2**30)


def _predicted(cell: dict[str, Any]) -> str:
    step, peak = cell.get("predicted_step_ms"), cell.get("predicted_peak_gib")
    if step is None or peak is None:
        return "-"
    return f"{step:.1f} ms {peak:.3g} GiB" if "step_ms" in cell else f"{peak:.3g} GiB"


def _verdict(target: dict[str, Any], cells: Cells, workload: dict[str, Any]) -> str:
    value = QUANTITIES[target["quantity"]](target["mode"], cells, workload)
    what, limit = f"{target['mode']}, {target['quantity']}: ", target["at_most"]
    if value is None:
        return f"{what}not measured (target {limit})"
    return f"{what}{value:.3g} (target {limit}: {'met' if value <= limit else 'missed'})"


def _peak_over_budget(mode: str, cells: Cells, workload: dict[str, Any]) -> float | None:
    return _ratio(saved_peak_bytes(cells[mode], workload), cells[mode].get("budget_bytes"))


def _prediction_error(mode: str, cells: Cells, workload: dict[str, Any]) -> float | None:
    ratio = _ratio(cells[mode].get("predicted_step_ms"), _step_ms(cells[mode]))
    return None if ratio is None else abs(ratio - 1)


def _overhead_over_checkpointing(mode: str, cells: Cells, workload: dict[str, Any]) -> float | None:
    ours, theirs, plain = (_step_ms(cells.get(name, {})) for name in (mode, "checkpointing", "none"))
    return None if ours is None or theirs is None or plain is None else (ours - plain) / (theirs - plain)


def _step_over(other: str) -> Callable[[str, Cells, dict[str, Any]], float | None]:
    return lambda mode, cells, workload: _ratio(_step_ms(cells[mode]), _step_ms(cells.get(other, {})))


def _saved_over_trl(mode: str, cells: Cells, workload: dict[str, Any]) -> float | None:
    return _ratio(saved_peak_bytes(cells[mode], workload), saved_peak_bytes(cells.get("TRL", {}), workload))


def _late_host_allocations(mode: str, cells: Cells, workload: dict[str, Any]) -> float | None:
    return cells[mode].get("late_host_allocations")


QUANTITIES: dict[str, Callable[[str, Cells, dict[str, Any]], float | None]] = {
    "peak / budget": _peak_over_budget,
    "error of predicted step": _prediction_error,
    "step / checkpointing": _step_over("checkpointing"),
    "overhead / checkpointing's": _overhead_over_checkpointing,
    "step / TRL": _step_over("TRL"),
    "saved / TRL": _saved_over_trl,
    "host allocations after step 2": _late_host_allocations,
}


def _step_ms(cell: dict[str, Any]) -> float | None:
    return cell["step_ms"]["median"] if "step_ms" in cell else None


def _ratio(value: float | None, over: float | None) -> float | None:
    return None if value is None or not over else value / over


def _format(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
