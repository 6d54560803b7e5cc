"""Targets of benchmarks, and their outcomes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The outcome of one target.

    Attributes:
        what: name of the quantity and of the mode that it belongs to.
        value: measured value; None if it was not measured.
        target: limit of the value.
        at_least: whether the limit is a lower one.
    """

    what: str
    value: float | None
    target: float
    at_least: bool = False

    @property
    def outcome(self) -> str:
        """Return `"met"`, `"missed"` or `"not measured"`."""
        if self.value is None:
            return "not measured"
        met = self.value >= self.target if self.at_least else self.value <= self.target
        return "met" if met else "missed"

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.what}: not measured (target {self.target:g})"
        return f"{self.what}: {self.value:.3g} (target {self.target:g}: {self.outcome})"


def ratio(value: float | None, over: float | None) -> float | None:
    """Return the quotient; None if either number is unknown."""
    return None if value is None or not over else value / over


def formatted(value: float | None, pattern: str) -> str:
    """Return the text for a table, `-` for an unknown value."""
    return "-" if value is None else pattern.format(value)
