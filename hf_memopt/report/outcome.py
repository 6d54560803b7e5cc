"""A policy's success and speed in one line, for the demo, its report and a model card."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """One policy's result: Euler steps and median time for an action chunk, and its share of successful tries."""

    num_steps: int
    success_rate: float | None  # None without any try
    latency_ms: float


def outcome_line(outcomes: Mapping[str, Outcome]) -> str:
    """Return "teacher: 94 % in 10 steps, 31 ms; student: 92 % in 1 step, 6 ms", without the rates that are unknown."""
    return "; ".join(f"{name}: {_describe(outcome)}" for name, outcome in outcomes.items())


def gain_line(outcomes: Mapping[str, Outcome]) -> str | None:
    """Return the student's speed, and its success, beside the teacher's in a sentence; None without both."""
    if not {"teacher", "student"} <= outcomes.keys():
        return None
    teacher, student = outcomes["teacher"], outcomes["student"]
    speed = f"An action chunk takes the student {student.latency_ms / teacher.latency_ms:.0%} of the teacher's time"
    if not teacher.success_rate or student.success_rate is None:
        return f"{speed}."
    return f"{speed}, and it succeeds {student.success_rate / teacher.success_rate:.0%} as often."


def steps_text(num_steps: int) -> str:
    return "1 step" if num_steps == 1 else f"{num_steps} steps"


def _describe(outcome: Outcome) -> str:
    success = "" if outcome.success_rate is None else f"{100 * outcome.success_rate:.0f} % in "
    return f"{success}{steps_text(outcome.num_steps)}, {outcome.latency_ms:.0f} ms"
