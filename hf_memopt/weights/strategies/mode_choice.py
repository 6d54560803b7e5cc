"""The choice of a teacher's mode: at the start from the arguments, with `auto` again from measurements."""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from hf_memopt.units import GIB, format_gib

TeacherMode = Literal["auto", "resident", "swap", "stream"]
TEACHER_MODES: tuple[str, ...] = get_args(TeacherMode)

# Share of the process's memory; the rest is left to fragmentation.
_USABLE = 0.95


class Choice(NamedTuple):
    """A mode, the reason in words, and the expected cost."""

    mode: str
    reason: str
    predicted_device_bytes: int  # the weights' peak
    # Per visit. At most this for swap, without `prefetch()`; at least this for stream, by bandwidth.
    predicted_stall_ms: float


def choose_at_start(
    mode: TeacherMode,
    weights_bytes: int,
    budget_bytes: int | None,
    device_type: str,
    home: str,
    counts_memory: Callable[[], bool],
) -> tuple[TeacherMode, str]:
    """Return the mode to begin with, and the reason in words. `auto` means streaming until steps were measured."""
    if mode != "auto":
        return mode, f"{mode} was asked for"
    if device_type == "cpu" and home == "host":
        return "resident", "it runs on the CPU, where offloading frees nothing"
    if budget_bytes is not None:
        own, budget = format_gib(weights_bytes), f"{budget_bytes / GIB:g} GiB"
        if weights_bytes <= budget_bytes:
            return "resident", f"its {own} fit the budget of {budget}"
        return "stream", f"its {own} exceed {budget}"
    if device_type == "cpu":
        return "stream", "it runs on the CPU, and no budget_gib says that its weights may stay in memory"
    if not counts_memory():
        return "swap", f"torch counts no memory on {device_type}, so there is nothing to choose by"
    return "auto", "it streams until two optimizer steps have been measured"


def usable_bytes(capacity_bytes: int) -> int:
    return int(_USABLE * capacity_bytes)


def choose(
    *,
    capacity_bytes: int,
    outside_bytes: int,
    inside_bytes: int,
    weights_bytes: int,
    stream_bytes: int,
    stream_visit_bytes: int,
    bytes_per_s: float,
    visit_s: float,
) -> Choice:
    """Return the first mode that fits, from the fastest to the smallest. Bytes are device memory.

    Resident, if the weights fit beside the step's peak. Swap, if they fit beside the peak of the teacher's own pass,
    which helps where the student's activations are larger. Otherwise stream.

    Args:
        capacity_bytes: for all tensors of this process.
        outside_bytes: their peak outside of visits, once the optimizer's state existed.
        inside_bytes: their peak during visits, the teacher's weights included.
        weights_bytes: all of the teacher's own weights.
        stream_bytes: held by streaming in a visit.
        stream_visit_bytes: copied by streaming in a visit.
        bytes_per_s: from host to device.
        visit_s: a visit, without waiting for copies.
    """
    usable, peak = usable_bytes(capacity_bytes), max(outside_bytes, inside_bytes)
    own, inside = format_gib(weights_bytes), format_gib(inside_bytes)
    if weights_bytes <= usable - peak:
        return Choice("resident", f"{own} fit beside the step's peak of {format_gib(peak)}", weights_bytes, 0.0)
    if weights_bytes <= usable - inside_bytes:
        reason = f"{own} fit beside the teacher's pass, {inside}, but not the step's peak"
        return Choice("swap", reason, weights_bytes, 1e3 * weights_bytes / bytes_per_s)
    stall_s = max(0.0, stream_visit_bytes / bytes_per_s - visit_s)
    reason = f"{own} do not fit beside the teacher's pass, {inside} of {format_gib(usable)}"
    return Choice("stream", reason, stream_bytes, 1e3 * stall_s)
