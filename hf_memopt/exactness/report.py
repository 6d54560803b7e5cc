"""The answer of `verify`, as text and as JSON."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_memopt.exactness.comparison import ROUNDINGS_ALLOWED, Difference, RunComparison, Verdict
from hf_memopt.exactness.recording import PHASES, Phase, Recording, TensorPlace
from hf_memopt.text_table import Cell, Table
from hf_memopt.units import MIB

_WORDS = {
    "equal": "equal, bit for bit",
    "rounding": "equal but for rounding",
    "different": "different, not by rounding",
    "not repeatable": "not repeatable",
}
_PLURALS: dict[Phase, str] = {
    "start": "weights at the start",
    "input": "inputs",
    "loss": "losses",
    "gradient": "gradients",
    "result": "results",
    "weight": "weights after updates",
    "optimizer": "optimizer states",
}

# Likely causes of a difference between two plain runs, by the phase of the first one.
_NOT_REPEATABLE: dict[Phase, str] = {
    "start": "weights are initialised before a seed is set; call transformers.set_seed(0) first",
    "input": "data differ from run to run: set a seed for shuffling and for augmentation, also in the workers of data "
    "loaders, and begin each run at the first batch",
    "loss": "the forward pass draws random numbers that no seed reaches, or its kernels are not deterministic: set the "
    "seed of each generator (torch, numpy, random), and name attn_implementation='sdpa' or 'eager'",
}
_UPDATE_NOT_REPEATABLE = (
    "kernels of backward or of the update are not deterministic: use torch's own attention and optimizer; or a "
    "schedule of learning rates or a gradient scaler goes on from run to run: make it anew in each"
)
# Likely causes of a difference between the plain and the switched run, likewise.
_FAULTS: dict[Phase, str] = {
    "start": "the models begin with different weights: the switch draws random numbers before they are initialised",
    "input": "the runs see different data: their order, the collator, or a generator that the switch advances",
    "loss": "the forward pass differs: random masks drawn from another state, other kernels, or lower precision",
    "gradient": "the forward pass is equal and backward is not: tensors that came back wrong or late (a stale copy, a "
    "copy that was not awaited), or recomputation that is not the forward pass again",
    "result": "the returned values",
    "weight": "gradients are equal and the update is not: the optimizer's precision or kernels, clipping, or the "
    "learning rate",
}
_WITH_DROPOUT: dict[Phase, str] = {
    "loss": "; train with dropout 0 to tell these apart",
    "gradient": "; train with dropout 0: if that is equal, masks were drawn again",
}


@dataclass(frozen=True)
class RunFigures:
    """The cost of a run, as in its `Recording`; `step_s` is that of the last step.

    `name` is "plain", "plain again", "switched" or "plain, rounded once".
    """

    name: str
    peak_bytes: int | None
    step_s: float | None
    recording_s: float


@dataclass(frozen=True)
class VerifyReport:
    """The comparison of a plain and a switched run; `str` gives it as text.

    Attributes:
        verdict: "equal", "rounding" (differences are no larger than `ROUNDINGS_ALLOWED` times the change that one
            rounding of all weights makes), "different", or "not repeatable" (the plain run differs from itself).
        num_steps, num_gradients: compared steps, and tensors with a gradient.
        first: the difference that the plain run computed first, those by rounding left out unless all are; of two
            plain runs where these differ.
        worst: the largest difference.
        losses_equal: whether the losses up to the first difference are equal, so that it is one of backward or of the
            update.
        differing, compared: tensors by phase: start, input, loss, gradient, result, weight, optimizer.
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
    advice = _advice_on_control(plain, comparison) if is_control else _advice(plain, switched, comparison)
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


def _advice_on_control(plain: Recording, comparison: RunComparison) -> str:
    if comparison.first is None:
        return ""
    if plain.not_deterministic:
        return (
            f"torch has no deterministic kernel here for {', '.join(plain.not_deterministic)}: replace these "
            "operations, or run on another device"
        )
    return _NOT_REPEATABLE.get(comparison.first.place.phase, _UPDATE_NOT_REPEATABLE)


def _advice(plain: Recording, switched: Recording, comparison: RunComparison) -> str:
    first = comparison.first
    if first is None:
        return ""
    if comparison.verdict == "rounding" and (not _has_other_dtype(first) or first.relative):
        return (
            "nothing, if rounding is allowed: another kernel or another order of sums. One rounding of all weights "
            f"makes changes of this size too (up to {ROUNDINGS_ALLOWED:g} times it is called rounding)"
        )
    if found := _recognised(plain, switched, first):
        return found
    if comparison.has_other_layout:
        masks = ", or random masks, which another layout draws anew: train with dropout 0" * plain.has_dropout
        return (
            "the runs arrange their inputs in other ways: other data, or losses that are weighed in another way" + masks
        )
    return _usual_faults(plain, first.place)


def _usual_faults(plain: Recording, place: TensorPlace) -> str:
    if place.phase == "weight" and place.name not in {each.name for each in plain.tensors if each.phase == "gradient"}:
        return (
            "gradients are equal and this buffer is not: statistics that the switch updates once more, by running the "
            "forward pass again, or not at all"
        )
    return _FAULTS.get(place.phase, _FAULTS["weight"]) + _WITH_DROPOUT.get(place.phase, "") * plain.has_dropout


def _recognised(plain: Recording, switched: Recording, found: Difference) -> str:
    """Return the fault if the switched tensor shows which one it is."""
    ours, theirs, place = found.plain, found.switched, found.place
    if theirs is None or ours is None:
        return f"only one run has this tensor: {'the switched' if ours is None else 'the plain'} one"
    if theirs.num_not_finite and not ours.num_not_finite:
        return f"{theirs.num_not_finite} of its elements are infinite or no numbers in the switched run alone"
    before = switched.before(place)
    if place.phase == "weight" and before is not None and before.sha256 == theirs.sha256:
        return "the update was skipped: the weight is the one before it"
    if place.phase == "gradient":
        if before is not None and before.sha256 == theirs.sha256:
            return "backward added nothing: the gradient is that of the pass before"
        factor = _factor(plain, switched, place)
        if factor is not None:
            share = "the gradient" if place.micro_batch <= 1 else "this micro-batch's share of the gradient"
            return f"{share} is {factor:.4g} times the plain one: how losses are divided and micro-batches weighed"
    if not found.relative and _has_other_dtype(found):
        return f"the values are equal, but stored as {theirs.dtype} instead of {ours.dtype}"
    return ""


def _has_other_dtype(found: Difference) -> bool:
    return found.plain is not None and found.switched is not None and found.plain.dtype != found.switched.dtype


def _factor(plain: Recording, switched: Recording, place: TensorPlace) -> float | None:
    """Return the factor between the shares that a backward pass has added, if they are multiples of each other."""
    shares = []
    for recording in (plain, switched):
        now, before = recording.tensors.get(place), recording.before(place)
        if now is None or now.num_not_finite:
            return None
        shares.append(now if before is None else now.minus(before))
    factor = shares[0].factor_to(shares[1])
    return factor if factor is not None and abs(factor - 1) > 1e-3 else None


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
    of_yardstick = (
        ""
        if found.of_yardstick is None or found.follows_from_equal
        else (f", {found.of_yardstick:.3g} times the change by one rounding of all weights")
    )
    return f"{values}relative {found.relative:.2g}, {found.roundings:.3g} roundings of {ours.dtype}{of_yardstick}"


def _difference(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    numbers = {name: getattr(found, name) for name in ("relative", "roundings", "of_yardstick")}
    return {
        **vars(found.place),
        **{name: value if value is None or math.isfinite(value) else str(value) for name, value in numbers.items()},
        "text": f"{found.place}, {_size(found)}",
    }


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
