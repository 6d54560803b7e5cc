"""The cost of training, as a section of the model card that a Trainer writes."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_memopt.report.runs import phase_peaks

_MEMORY = "memory/"


def training_section(
    history: Sequence[Mapping[str, Any]],
    *,
    device: str,
    update: str,
    seconds_per_batch: float,
    offloading: str,
) -> str | None:
    """Return Markdown about memory and time, or None where the log has no memory figures yet.

    The history is a Trainer's log; `seconds_per_batch` are of forward, backward and the update alone.
    """
    logged = [entry for entry in history if any(name.startswith(_MEMORY) for name in entry)]
    if not logged:
        return None
    rows = {
        "device": device,
        "peak memory": _peak(logged),
        "update": update,
        "time": f"{seconds_per_batch:.3g} s for each forward and backward pass, with its share of the update",
        "activation offloading": offloading,
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["## Memory and time in training", "", "| | |", "|---|---|", *lines, "", "Measured by hf_memopt."])


def _peak(logged: Sequence[Mapping[str, Any]]) -> str:
    allocated, reserved, host = (
        max((entry[_MEMORY + name] for entry in logged if _MEMORY + name in entry), default=None)
        for name in ("peak_allocated_gib", "reserved_gib", "host_rss_gib")
    )
    if allocated is None:
        return f"{host:.2f} GiB of the process; its device counts none of its own"
    phases = phase_peaks(logged[-1])
    where = f", in {max(phases, key=lambda phase: phase.at_least_gib).name}" if phases else ""
    return f"{allocated:.2f} GiB allocated{where}; {reserved:.2f} GiB reserved"
