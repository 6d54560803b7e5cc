"""The answer of `verify`, as text and as JSON."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_memopt.exactness.causes import advice_on_control, advice_on_switch
from hf_memopt.exactness.comparison import Difference, RunComparison, Verdict
from hf_memopt.exactness.recording import PHASES, Phase, Recording
from hf_memopt.text_table import Cell, Table
from hf_memopt.units import MIB

_WORDS = {
    "equal": "equal, bit for bit",
    "rounding": "equal but for rounding",
    "small": "small, but not rounding",
    "different": "different, not by rounding",
    "not repeatable": "not repeatable",
}
_PLURALS: dict[Phase, str] = {
    "start": "weights at the start",
    "input": "inputs",
    "loss": "losses",
    "gradient": "gradients",
    "setting": "settings of optimizers",
    "result": "results",
    "weight": "weights after updates",
    "optimizer": "optimizer states",
}


@dataclass(frozen=True)
class RunFigures:
    """The cost of a run, as in its `Recording`."""

    name: str  # of a `Kind`, such as "plain again"
    peak_bytes: int | None
    step_s: float | None  # of the last step
    recording_s: float


@dataclass(frozen=True)
class VerifyReport:
    """The comparison of a plain and a switched run; `str` gives it as text.

    Attributes:
        verdict: "equal", "rounding" (differences are random and as small as rounding makes them in this program),
            "small" (as small, but systematic), "different", or "not repeatable" (the plain run differs from itself).
        num_steps, num_gradients: compared steps, and tensors with a gradient.
        first: of the differences that decide the verdict, the one that the plain run computed first; of two plain runs
            where these differ.
        worst: the largest difference, as a multiple of what rounding makes.
        losses_equal: whether the losses up to the first difference are equal, so that it is one of backward or of the
            update.
        differing, compared: tensors by phase: start, input, loss, gradient, setting, result, weight, optimizer.
        not_compared: tensors that could not be compared, with reasons.
        advice: likely causes to look at; empty for equal runs.
        runs: memory and time.
    """

    verdict: Verdict | str
    num_steps: int
    num_gradients: int
    first: Difference | None
    worst: Difference | None
    losses_equal: bool
    differing: dict[Phase, int]
    compared: dict[Phase, int]
    not_compared: list[str]
    advice: str
    runs: list[RunFigures]

    @property
    def equal(self) -> bool:
        return self.verdict == "equal"

    @property
    def words(self) -> str:
        """The verdict in words."""
        return _WORDS[self.verdict]

    @property
    def headline(self) -> str:
        """The verdict in words, with the number of steps and gradients, or with the place where a difference begins."""
        if self.first is None:
            steps, gradients = _count(self.num_steps, "step"), _count(self.num_gradients, "gradient")
            return f"{self.words}, over {steps} and {gradients}"
        if self.verdict == "not repeatable":
            return f"{self.words}: two plain runs differ, first in {self.first.place}"
        so_far = ", after equal losses" if self.losses_equal else ""
        return f"{self.words}, first in {self.first.place}{so_far}"

    @property
    def answer(self) -> str:
        """The headline, the size of differences, and likely causes."""
        lines = [self.headline]
        if self.first is not None:
            lines.append(f"  {_size(self.first)}")
        if self.worst is not None and self.worst is not self.first:
            lines.append(f"  largest: {self.worst.place}, {_size(self.worst)}")
        if self.first is not None:
            lines.append(f"  differing: {'; '.join(self._shares())}")
        lines += [f"  not compared: {each}" for each in self.not_compared]
        if self.advice:
            lines.append(f"  look at: {self.advice}")
        return "\n".join(lines)

    def __str__(self) -> str:
        rows: list[list[Cell]] = [
            [run.name, None if run.peak_bytes is None else run.peak_bytes / MIB, run.step_s, run.recording_s]
            for run in self.runs
        ]
        return f"{self.answer}\n\n{Table(['run', 'peak MiB', 's / step', 's of recording'], rows, digits=2)}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything in JSON's types; infinite numbers as text."""
        found = {"verdict": self.verdict, "equal": self.equal, "headline": self.headline, **vars(self)}
        differences = {"first": _difference(self.first), "worst": _difference(self.worst)}
        return {**found, **differences, "runs": [vars(run) for run in self.runs]}

    def _shares(self) -> Iterator[str]:
        for phase in PHASES:
            if phase in self.compared:
                yield f"{self.differing.get(phase, 0)} of {self.compared[phase]} {_PLURALS[phase]}"


def report_of(
    plain: Recording, switched: Recording, comparison: RunComparison, runs: list[RunFigures], *, is_control: bool
) -> VerifyReport:
    """Return the report of a comparison; with `is_control`, that of two plain runs which should have been equal."""
    first, differences = comparison.first, comparison.differences
    differing = Counter(each.place.phase for each in differences)
    up_to_first = differences[: differences.index(first) + 1] if first is not None else []
    advice = advice_on_control(plain, comparison) if is_control else advice_on_switch(plain, switched, comparison)
    return VerifyReport(
        verdict="not repeatable" if is_control else comparison.verdict,
        num_steps=min(plain.num_steps, switched.num_steps),
        num_gradients=comparison.num_gradients,
        first=first,
        worst=comparison.worst,
        losses_equal="loss" in comparison.num_compared
        and not any(each.place.phase in ("start", "input", "loss") for each in up_to_first),
        differing=dict(differing),
        compared=comparison.num_compared,
        not_compared=comparison.not_compared,
        advice=advice,
        runs=runs,
    )


def _size(found: Difference) -> str:
    ours, theirs = found.plain, found.switched
    if ours is None or theirs is None:
        return "which one run lacks"
    if ours.shape != theirs.shape:
        return f"of shape {theirs.shape} instead of {ours.shape}"
    if math.isinf(found.relative):
        return "whose elements are not finite" if theirs.num_not_finite else "which is zero in the plain run"
    if not found.relative:
        bits = f"by bits below 1e-16 of its norm, or signs of zeros, as {theirs.dtype}"
        return bits if ours.dtype == theirs.dtype else f"as {theirs.dtype} instead of {ours.dtype}"
    values = "" if ours.value is None or theirs.value is None else f"{theirs.value:.9g} instead of {ours.value:.9g}: "
    of_yardstick = "" if found.of_yardstick is None else f", {found.of_yardstick:.3g} {found.unit}"
    return f"{values}relative {found.relative:.2g}, {found.roundings:.3g} roundings of {ours.dtype}{of_yardstick}"


def _difference(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    numbers = {name: getattr(found, name) for name in ("relative", "roundings", "of_yardstick", "allowed")}
    return {
        **vars(found.place),
        **{name: value if value is None or math.isfinite(value) else str(value) for name, value in numbers.items()},
        **{name: getattr(found, name) for name in ("verdict", "unit", "systematic")},
        "text": f"{found.place}, {_size(found)}",
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
