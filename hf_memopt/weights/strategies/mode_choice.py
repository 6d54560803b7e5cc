"""Chooses a teacher's mode: at the start from the arguments, and with mode `auto` again from measurements."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from hf_memopt.units import GIB, format_gib

TeacherMode = Literal["auto", "resident", "swap", "stream"]
TEACHER_MODES: tuple[str, ...] = get_args(TeacherMode)

# Of the memory that the process's tensors may have: the rest is left to fragmentation.
_USABLE = 0.95


@dataclass(frozen=True)
class StepMeasurements:
    """The measurements that a choice is made from. Bytes are device memory.

    Attributes:
        capacity_bytes: memory that all tensors of this process may take.
        outside_bytes: their peak outside of the teacher's visits, once the optimizer's state existed.
        inside_bytes: their peak during visits, those of the teacher's weights included.
        weights_bytes: all of the teacher's own weights.
        stream_bytes: memory that streaming holds in a visit, hot set and ring.
        stream_visit_bytes: bytes that streaming copies in a visit.
        bytes_per_s: from host to device.
        visit_s: the teacher's time for a visit, without waiting for copies.
    """

    capacity_bytes: int
    outside_bytes: int
    inside_bytes: int
    weights_bytes: int
    stream_bytes: int
    stream_visit_bytes: int
    bytes_per_s: float
    visit_s: float


@dataclass(frozen=True)
class Choice:
    """A mode, the reason for it, and its expected cost.

    Attributes:
        mode: `"resident"`, `"swap"` or `"stream"`.
        reason: in words.
        predicted_device_bytes: the most that the weights will hold on the device.
        predicted_stall_ms: for how long compute will wait for copies, per visit. For swap this is without `prefetch()`,
            so at most this; for stream it is the bound that bandwidth sets, so at least this.
    """

    mode: str
    reason: str
    predicted_device_bytes: int
    predicted_stall_ms: float


def choose_at_start(
    mode: TeacherMode,
    weights_bytes: int,
    budget_bytes: int | None,
    device_type: str,
    counts_memory: Callable[[], bool],
) -> tuple[TeacherMode, str]:
    """Return the mode to begin with, and the reason in words. `auto` stands for streaming until steps were measured.

    Args:
        mode: the user's.
        weights_bytes: all of the teacher's own weights.
        budget_bytes: device memory that they may take, None for no budget.
        device_type: the type of the device that the teacher computes on.
        counts_memory: asked last, whether torch counts the memory of that device.
    """
    if mode != "auto":
        return mode, f"{mode} was asked for"
    if device_type == "cpu":
        return "resident", "it runs on the CPU, where offloading frees nothing"
    if budget_bytes is not None:
        own, budget = format_gib(weights_bytes), f"{budget_bytes / GIB:g} GiB"
        if weights_bytes <= budget_bytes:
            return "resident", f"its {own} fit the budget of {budget}"
        return "stream", f"its {own} exceed {budget}"
    if not counts_memory():
        return "swap", f"torch counts no memory on {device_type}, so there is nothing to choose by"
    return "auto", "it streams until two optimizer steps have been measured"


def usable_bytes(capacity_bytes: int) -> int:
    """Return the share of the memory that a plan may count on."""
    return int(_USABLE * capacity_bytes)


def choose(measured: StepMeasurements) -> Choice:
    """Return the first mode that fits, from the fastest to the smallest.

    Resident, if the weights fit beside the step's peak. Swap, if they fit beside the peak of the teacher's own pass,
    which helps where the student's activations are the larger ones. Otherwise stream.
    """
    usable = usable_bytes(measured.capacity_bytes)
    outside = max(measured.outside_bytes, measured.inside_bytes)
    weights = measured.weights_bytes
    own, inside = format_gib(weights), format_gib(measured.inside_bytes)
    if weights <= usable - outside:
        return Choice("resident", f"{own} fit beside the step's peak of {format_gib(outside)}", weights, 0.0)
    if weights <= usable - measured.inside_bytes:
        reason = f"{own} fit beside the teacher's pass, {inside}, but not the step's peak"
        return Choice("swap", reason, weights, 1e3 * weights / measured.bytes_per_s)
    stall_s = max(0.0, measured.stream_visit_bytes / measured.bytes_per_s - measured.visit_s)
    reason = f"{own} do not fit beside the teacher's pass, {inside} of {format_gib(usable)}"
    return Choice("stream", reason, measured.stream_bytes, 1e3 * stall_s)
