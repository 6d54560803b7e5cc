"""Targets of benchmarks and what was found of them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """One target.

    Attributes:
        what: the quantity, with whose it is.
        value: as measured; None if it was not.
        target: the limit.
        at_least: whether the value has to reach the limit, not stay within it.
    """

    what: str
    value: float | None
    target: float
    at_least: bool = False

    @property
    def outcome(self) -> str:
        """`"met"`, `"missed"` or `"not measured"`."""
        if self.value is None:
            return "not measured"
        met = self.value >= self.target if self.at_least else self.value <= self.target
        return "met" if met else "missed"

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.what}: not measured (target {self.target:g})"
        return f"{self.what}: {self.value:.3g} (target {self.target:g}: {self.outcome})"


def ratio(value: float | None, over: float | None) -> float | None:
    """None if either is unknown."""
    return None if value is None or not over else value / over


def formatted(value: float | None, pattern: str) -> str:
    """As a table shows it: `-` for what is unknown."""
    return "-" if value is None else pattern.format(value)
