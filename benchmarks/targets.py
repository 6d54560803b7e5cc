"""Targets of benchmarks, and their outcomes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    what: str  # quantity, and the mode that it belongs to
    value: float | None
    target: float
    at_least: bool = False  # whether the limit is a lower one

    @property
    def outcome(self) -> str:
        if self.value is None:
            return "not measured"
        met = self.value >= self.target if self.at_least else self.value <= self.target
        return "met" if met else "missed"

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.what}: not measured (target {self.target:g})"
        return f"{self.what}: {self.value:.3g} (target {self.target:g}: {self.outcome})"


def ratio(value: float | None, over: float | None) -> float | None:
    return None if value is None or not over else value / over


def formatted(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
