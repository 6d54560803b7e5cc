"""A run's figures as rows and in words, for the page's tables and first lines, and for model cards."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_memopt.report.offloading import PlanTable
from hf_memopt.report.runs import DEVICE_PEAK, Run, gain_line, memory_column, outcome_line, phase_peaks
from hf_memopt.text_table import Cell, Table
from hf_memopt.units import GIB, format_bytes, format_ms, unit_for

_MODE_COLUMNS = {
    "peak MiB": "peak_mib",
    "process MiB": "process_mib",
    "saved MiB": "saved_mib",
    "predicted MiB": "predicted_saved_mib",
    "moved MiB/step": "moved_mib",
    "host MiB": "host_mib",
    "disk MiB": "disk_mib",
    "written MiB/step": "written_mib",
    "step ms": "step_ms",
    "stall ms": "stall_ms",
    "pass ms": "measured_step_ms",
    "predicted ms": "predicted_step_ms",
}
_MEMORY = "memory/"


def headlines(run: Run) -> list[str]:
    outcome = [outcome_line(run.outcomes), gain_line(run.outcomes)] if run.outcomes else []
    return [
        *filter(None, outcome),
        *_offloading_headline(run),
        *_mode_headline(run),
        *_holder_headline(run),
        *_phase_headline(run),
    ]


def mode_table(modes: Sequence[Mapping[str, Any]]) -> Table:
    """Return memory and time by mode, the reference first; columns that no mode has a figure for are left out."""
    shown = {title: key for title, key in _MODE_COLUMNS.items() if any(mode.get(key) is not None for mode in modes)}
    rows: list[list[Cell]] = [[mode["mode"], *(mode.get(key) for key in shown.values())] for mode in modes]
    if len(modes) < 2:
        return Table(["mode", *shown], rows)
    for mode, row in zip(modes, rows, strict=True):
        row.append(str(mode.get("failure") or mode.get("compared") or "not compared"))
    return Table(["mode", *shown, "compared"], rows)


def differing_modes(modes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the modes that ran and of which some bits are not those of the first, if that ran."""
    return [mode["mode"] for mode in modes if mode.get("equal") is False]


def holder_table(run: Run) -> Table:
    phases = list(next(iter(run.holders.values())))
    reference = max(_totals(next(iter(run.holders.values()))))
    unit, size = unit_for(max(max(_totals(by_phase)) for by_phase in run.holders.values()))
    rows: list[list[Cell]] = []
    for design, by_phase in run.holders.items():
        totals = [total / size for total in _totals(by_phase)]
        rows.append([design, *totals, max(totals), max(totals) * size / reference if reference else None])
    return Table([f"{unit} by phase", *phases, "peak", "of the first"], rows, digits=2)


def phase_table(run: Run) -> Table:
    unit, size = unit_for(GIB * max(phase.at_most_gib for phase in run.phases))
    bounds = [(phase.name, GIB / size * phase.at_least_gib, GIB / size * phase.at_most_gib) for phase in run.phases]
    if run.phases_are_exact:
        return Table(["phase", unit], [[name, figure] for name, figure, _ in bounds], digits=2)
    return Table(["phase", f"at least {unit}", f"at most {unit}"], bounds, digits=2)


def plan_table(plan: PlanTable) -> Table:
    """Return the bytes that each kind of module saves, the largest first, by the actions that the plan takes."""
    unit, size = unit_for(max((max(row[1:]) for row in plan.rows), default=0))
    columns = {1: "kept", 2: "offloaded", 3: "recomputed"}
    shown = {place: title for place, title in columns.items() if any(row[place] for row in plan.rows)}
    rows: list[list[Cell]] = [[row[0], *(int(row[place]) / size for place in shown)] for row in plan.rows]
    return Table([f"saved by ({unit})", *shown.values()], rows, digits=2)


def policy_table(run: Run) -> Table:
    fields = {"difference to the teacher": "error", "ms per chunk": "latency_ms", "success": "success_rate"}
    shown = {title: key for title, key in fields.items() if any(found[key] is not None for found in run.policies)}
    rows: list[list[Cell]] = [
        [found["policy"], found["num_steps"], *(found[key] for key in shown.values())] for found in run.policies
    ]
    return Table(["policy", "Euler steps", *shown], rows, digits=3)


def _totals(by_phase: Mapping[str, Mapping[str, int]]) -> list[int]:
    return [sum(kinds.values()) for kinds in by_phase.values()]


def _offloading_headline(run: Run) -> Iterator[str]:
    stats = None if run.offloading is None else run.offloading.stats
    if stats is None:
        return
    if stats.plain_peak_gib is None or stats.measured_peak_gib is None:
        yield "Activation offloading was on and moved nothing."
        return
    yield (
        f"Saved activations at the peak of a step: {format_bytes(GIB * stats.plain_peak_gib)} if all were kept, "
        f"{format_bytes(GIB * stats.measured_peak_gib)} measured with offloading "
        f"({_less(stats.measured_peak_gib / stats.plain_peak_gib)})."
    )


def _mode_headline(run: Run) -> Iterator[str]:
    key, title = memory_column(run.modes)
    if len(run.modes) > 1 and all(mode.get("equal") for mode in run.modes[1:]):
        modes = ", ".join(mode["mode"] for mode in run.modes)
        yield f"Losses, gradients and weights are equal, bit for bit, in modes {modes}."
    yield from (f"Mode {mode['mode']}: {mode['failure']}." for mode in run.modes if mode.get("failure"))
    measured: Sequence[Mapping[str, Any]] = [mode for mode in run.modes if mode.get(key)]
    if len(measured) > 1 and measured[0] is run.modes[0]:
        first, least = measured[0], min(measured, key=lambda mode: mode[key])
        # Without a device to copy from, times are no measure.
        slowdown = (
            f", in {least['step_ms'] / first['step_ms']:.2f} times the time" if run.facts.get("device") != "cpu" else ""
        )
        yield (
            f"{title}: {first[key]:,.1f} MiB in mode {first['mode']}, {least[key]:,.1f} MiB in mode {least['mode']} "
            f"({_less(least[key] / first[key])}){slowdown}."
        )


def _holder_headline(run: Run) -> Iterator[str]:
    peaks = {design: max(_totals(by_phase)) for design, by_phase in run.holders.items()}
    if len(peaks) > 1 and next(iter(peaks.values())):
        first, least = next(iter(peaks)), min(peaks, key=peaks.__getitem__)
        yield (
            f"Counted peak on the device: {format_bytes(peaks[first])} with “{first}”, {format_bytes(peaks[least])} "
            f"with “{least}” ({_less(peaks[least] / peaks[first])})."
        )


def _less(share: float) -> str:
    return f"{1 - share:.0%} less" if share < 1 else "no less"


def _phase_headline(run: Run) -> Iterator[str]:
    peak_gib = run.timeline[-1].get(DEVICE_PEAK) if run.timeline else None
    if peak_gib is not None:
        phase = next((found.name for found in run.phases if found.at_least_gib == peak_gib), None)
        where = f", in the phase “{phase}”" if phase else ""
        yield f"The most that tensors held on the device: {format_bytes(GIB * peak_gib)}{where}."
    elif run.timeline and not (run.modes or run.holders or run.offloading):
        host_gib = max(record["memory/host_rss_gib"] for record in run.timeline)
        yield f"The most host memory that the process held at a logged step: {format_bytes(GIB * host_gib)}."


def training_facts(
    history: Sequence[Mapping[str, Any]], *, device: str, update: str, seconds_per_batch: float
) -> dict[str, str] | None:
    """Return device, memory and time in words, or None where the log has no memory figures yet.

    The history is a Trainer's log; `seconds_per_batch` are of forward, backward and the update alone.
    """
    logged = [entry for entry in history if any(name.startswith(_MEMORY) for name in entry)]
    if not logged:
        return None
    return {
        "device": device,
        "peak memory": _peak(logged),
        "update": update,
        "time": f"{format_ms(1e3 * seconds_per_batch)} for each forward and backward, with its share of the update",
    }


def training_section(facts: Mapping[str, str]) -> str:
    """Return facts as a section of a model card, in Markdown."""
    lines = [f"| {name} | {fact} |" for name, fact in facts.items()]
    return "\n".join(["## Memory and time in training", "", "| | |", "|---|---|", *lines, "", "Measured by hf_memopt."])


def _peak(logged: Sequence[Mapping[str, Any]]) -> str:
    allocated, reserved, host = (
        max((entry[_MEMORY + name] for entry in logged if _MEMORY + name in entry), default=None)
        for name in ("peak_allocated_gib", "reserved_gib", "host_rss_gib")
    )
    if allocated is None:
        return f"{host:.2f} GiB of host memory, by the process"
    phases = phase_peaks(logged[-1])
    where = f", in {max(phases, key=lambda phase: phase.at_least_gib).name}" if phases else ""
    return f"{allocated:.2f} GiB allocated{where}; {reserved:.2f} GiB reserved"
