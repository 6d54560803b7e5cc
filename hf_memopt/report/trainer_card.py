"""The cost of a Trainer's run, for its model card and its report."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_memopt.report.runs import phase_peaks
from hf_memopt.units import format_ms

_MEMORY = "memory/"


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
