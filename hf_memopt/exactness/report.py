"""The answer of `verify`, as text and as JSON, with likely causes of a difference.

Causes follow from the tensors' own figures, and from the place where they differ first.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hf_memopt.exactness.comparison import Difference, RunComparison, Verdict, other_precision
from hf_memopt.exactness.recording import PHASES, Fingerprint, Phase, Recording, TensorPlace
from hf_memopt.text_table import Cell, Table
from hf_memopt.units import MIB

# Of a difference between two plain runs, by the phase of the first one.
_NOT_REPEATABLE: dict[Phase, str] = {
    "start": "weights are initialised before a seed is set; call transformers.set_seed(0) first",
    "input": "data differ from run to run: set a seed for shuffling and for augmentation, also in the workers of data "
    "loaders, and begin each run at the first batch",
    "loss": "the forward pass draws random numbers that no seed reaches, or its kernels are not deterministic: set the "
    "seed of each generator (torch, numpy, random, and those that the program makes), and name "
    "attn_implementation='sdpa' or 'eager'",
}
_UPDATE_NOT_REPEATABLE = (
    "kernels of backward or of the update are not deterministic: use torch's own attention and optimizer; or a "
    "schedule of learning rates or a gradient scaler goes on from run to run: make it anew in each"
)
STAYS_ON = (
    "the second plain run equals the switched run before it, and not the first one: something that the switch changes "
    "stays on, such as a patched class or a global setting; put it back at the end of switched()"
)
# Of a difference between the plain and the switched run, likewise.
_FAULTS: dict[Phase, str] = {
    "start": "the models begin with different weights: the switch draws random numbers before they are initialised",
    "input": "the runs see different data: their order, the collator, or a generator that the switch advances",
    "loss": "the forward pass or the loss differs: a term or a sample that is missing or counted twice, labels, random "
    "masks drawn from another state, other kernels, or lower precision",
    "gradient": "the forward pass is equal and backward is not: tensors that came back wrong or late (a stale copy, a "
    "copy that was not awaited), or recomputation that is not the forward pass again",
    "result": "the returned values",
    "weight": "gradients are equal and the update is not: the optimizer's precision or kernels, clipping, the learning "
    "rate, or weight decay",
}
_SETTINGS = {
    "lr": "the learning rate or its schedule, such as one that goes on with each micro-batch",
    "weight_decay": "weight decay, or which parameters it is for",
}
_WITH_DROPOUT: dict[Phase, str] = {
    "loss": "; train with dropout 0 to tell these apart",
    "gradient": "; train with dropout 0: if that is equal, masks were drawn again",
}
_SCALED = "the learning rate or its schedule, or a gradient that was scaled, zeroed or lost after backward"
_WEIGHING = "how losses are divided and micro-batches weighed"


def advice_on_control(plain: Recording, comparison: RunComparison) -> str:
    """Return likely causes of a difference between two plain runs."""
    if comparison.first is None:
        return ""
    if plain.not_deterministic:
        return (
            f"torch has no deterministic kernel here for {', '.join(plain.not_deterministic)}: replace these "
            "operations, or run on another device"
        )
    return _NOT_REPEATABLE.get(comparison.first.place.phase, _UPDATE_NOT_REPEATABLE)


def advice_on_switch(plain: Recording, switched: Recording, comparison: RunComparison) -> str:
    """Return likely causes of a difference between the plain and the switched run."""
    first = comparison.first
    if first is None:
        return ""
    if comparison.verdict == "rounding" and (not _has_other_dtype(first) or first.relative):
        return (
            "nothing, if rounding is allowed: another kernel or another order of sums. Differences are random, and as "
            "small as other rounding makes them here"
        )
    for found in (first, comparison.differences[0]):
        if cause := _recognised(plain, switched, found, comparison):
            return cause
    if comparison.has_other_layout:
        masks = ", or random masks, which another layout draws anew: train with dropout 0" * plain.has_dropout
        return (
            "the runs arrange their inputs in other ways: other data, or losses that are weighed in another way" + masks
        )
    # The earliest difference causes the later ones, even if it is as small as rounding.
    phase = comparison.differences[0].place.phase
    return _FAULTS.get(phase, _FAULTS["weight"]) + _WITH_DROPOUT.get(phase, "") * plain.has_dropout


def _recognised(plain: Recording, switched: Recording, found: Difference, comparison: RunComparison) -> str:
    """Return the fault if the switched tensor shows which one it is."""
    ours, theirs, place = found.plain, found.switched, found.place
    if theirs is None or ours is None:
        return f"only one run has this tensor: {'the switched' if ours is None else 'the plain'} one"
    if theirs.num_not_finite and not ours.num_not_finite:
        return f"{theirs.num_not_finite} of its elements are infinite or no numbers in the switched run alone"
    if not found.relative and _has_other_dtype(found):
        return f"the values are equal, but stored as {theirs.dtype} instead of {ours.dtype}"
    match place.phase:
        case "setting" if ours.value is not None and theirs.value is not None:
            option = place.name.partition(" of ")[0]
            cause = _SETTINGS.get(option, "options of the optimizer")
            return f"{option} is {theirs.value:.6g} instead of {ours.value:.6g}: {cause}"
        case "loss" if not comparison.has_other_layout:
            return _of_losses(plain, switched)
        case "gradient":
            more = (each.place.name for each in comparison.differences if each.plain is None)
            if (name := next(more, None)) is not None:
                return f"the switched run trains {name} too: weights that are tied in the plain run, or frozen"
            return _of_gradient(plain, switched, found)
        case "weight" | "optimizer":
            return _of_update(plain, switched, place) or (f"{found.systematic}: {_SCALED}" * bool(found.systematic))
        case _ if precision := other_precision(found):
            return f"{precision}: it is rounded to a lower precision"
    return ""


def _of_losses(plain: Recording, switched: Recording) -> str:
    """Return what all losses have in common: a factor, or a term."""
    places = [place for place in plain.tensors if place.phase == "loss" and place in switched.tensors]
    pairs = [(plain.tensors[place].value, switched.tensors[place].value) for place in places]
    values = [(ours, theirs) for ours, theirs in pairs if ours and theirs is not None and ours != theirs]
    if len(values) < max(2, len(pairs)):
        return ""
    terms = [theirs - ours for ours, theirs in values]
    shares = [(theirs - ours) / ours for ours, theirs in values]
    spreads = [(max(each) - min(each)) * len(each) / (abs(math.fsum(each)) or math.nan) for each in (terms, shares)]
    if not min(spreads) <= 0.05:
        return ""
    if spreads[1] < spreads[0]:
        return f"the loss is {1 + shares[0]:.6g} times the plain one: {_WEIGHING}"
    return f"the loss is {abs(terms[0]):.4g} {'more' if terms[0] > 0 else 'less'} each time: a term that one run lacks"


def _of_gradient(plain: Recording, switched: Recording, found: Difference) -> str:
    """Return what a backward pass did to a gradient, or what had happened to it before."""
    place, (before, other) = found.place, (each.before(found.place) for each in (plain, switched))
    if switched.is_unchanged(place):
        return "backward added nothing: the gradient is that of the pass before"
    ours, theirs = (each.tensors.get(place) for each in (plain, switched))  # none of a step's last pass
    if ours is not None and theirs is not None and math.isfinite(ours.distance(theirs)):
        pairs = ((ours, before), (theirs, other))
        share_of_plain, share_of_switched = (now if then is None else now.minus(then) for now, then in pairs)
        factor = share_of_plain.factor_to(share_of_switched)
        if factor is not None and abs(factor - 1) > 1e-3:
            share = "the gradient" if place.micro_batch <= 1 else "this micro-batch's share of the gradient"
            return f"{share} is {_times(factor)} the plain one: {_WEIGHING}"
        change = theirs.minus(ours)
        kept = _of_step_before(switched, place)
        if kept is not None and kept.is_parallel(change, 0.99) and abs(kept.along(change) - 1) < 0.01:
            return "the gradient of the step before is still there: it was not set to zero"
        if before is not None and before.is_parallel(change):
            return (
                f"this micro-batch's share is right, and what was there before is {_times(1 + before.along(change))} "
                "the plain gradient: it was clipped, scaled or zeroed before accumulation ended"
            )
    if found.systematic and found.systematic == other_precision(found):
        return f"{found.systematic}: an autocast region that one run leaves out, or a copy in a lower precision"
    return f"{found.systematic}: {_WEIGHING}" if found.systematic else ""


def _of_update(plain: Recording, switched: Recording, place: TensorPlace) -> str:
    """Return what an update after equal gradients has in common with the plain one."""
    before, weights = plain.before(place), [each.tensors[place] for each in (plain, switched)]
    if place.phase == "weight" and switched.is_unchanged(place):
        return "the update was skipped: the weight is the one before it"
    if place.phase == "weight" and place.name not in {each.name for each in plain.tensors if each.phase == "gradient"}:
        return (
            "gradients are equal and this buffer is not: statistics that the switch updates once more, by running the "
            "forward pass again, or not at all"
        )
    for average in ("exp_avg", "momentum_buffer"):
        at = replace(place, phase="optimizer", name=f"{average} of {place.name.removeprefix(f'{average} of ')}")
        ours, theirs = (each.tensors.get(at) for each in (plain, switched))
        factor = None if ours is None or theirs is None else ours.factor_to(theirs)
        if factor is not None and abs(factor - 1) > 1e-3:
            return f"the optimizer got {_times(factor)} the plain gradient: clipping, or a scale that is not taken out"
    if before is None or weights[0].shape != before.shape:
        return ""
    update, change = weights[0].minus(before), weights[1].minus(weights[0])
    if update.is_parallel(change):
        return f"the update is {_times(1 + update.along(change))} the plain one: {_SCALED}"
    if before.is_parallel(change):
        return f"the weight itself, times {before.along(change):.3g}, is added to the update: weight decay"
    return ""


def _of_step_before(recording: Recording, place: TensorPlace) -> Fingerprint | None:
    """Return the gradient that the update before a step's first backward pass took."""
    found = {
        each.micro_batch: each
        for each in recording.tensors
        if each.phase == "gradient" and each.name == place.name and each.step == place.step - 1
    }
    return recording.tensors[found[max(found)]] if found and place.micro_batch <= 1 else None


def _times(factor: float) -> str:
    return f"{round(factor, 6) + 0.0:.4g} times"


def _has_other_dtype(found: Difference) -> bool:
    return found.plain is not None and found.switched is not None and found.plain.dtype != found.switched.dtype


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
