"""Compares two recordings bit by bit, and judges the size of differences by that of one rounding of the weights."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from hf_memopt.exactness.fingerprint import Fingerprint
from hf_memopt.exactness.recording import Phase, Recording, TensorPlace

Verdict = Literal["equal", "rounding", "different"]

# Differences of at most so many times the change by one rounding of all weights have the size of rounding.
ROUNDINGS_ALLOWED = 10.0
# Leaves of which a switch may need more: a reentrant checkpoint needs an input that has a gradient.
_OUTSIDE_OF_MODELS = ("input ", "leaf ")
_OF_THE_END: tuple[Phase, ...] = ("weight", "optimizer")
# One run may hold some of them elsewhere: ZeRO-3 shows its weights first in the forward pass, and buffers at once.
_HELD_ELSEWHERE: tuple[Phase, ...] = ("start", "input", "optimizer")


@dataclass(frozen=True)
class Difference:
    """A tensor that differs.

    Attributes:
        relative: norm of the difference as a share of the plain tensor's norm, estimated; infinite for tensors of other
            shapes, of which one run lacks one, or with elements that are not finite.
        roundings: the same in units of the precision in which the plain tensor is stored.
        of_yardstick: the same as a multiple of the change that one rounding of all weights makes to this tensor; None
            without such a yardstick, and for weights that had no update.
        follows_from_equal: whether it is of the first update that differs, after equal gradients. Rounding of weights
            before the forward pass is no measure of that: it can be larger than the whole update.
    """

    place: TensorPlace
    plain: Fingerprint | None
    switched: Fingerprint | None
    relative: float
    roundings: float
    of_yardstick: float | None
    follows_from_equal: bool = False

    @property
    def is_rounding(self) -> bool:
        if self.place.phase == "start" or self.of_yardstick is None:
            return False
        return (self.roundings if self.follows_from_equal else self.of_yardstick) <= ROUNDINGS_ALLOWED


@dataclass(frozen=True)
class RunComparison:
    """All differences between two recordings, in the order in which the plain run computed the tensors.

    Attributes:
        num_compared: tensors, by phase.
        not_compared: tensors that could not be compared, with reasons.
        has_other_layout: whether the switched run cuts or arranges its data in another way, such as packed instead of
            padded, so that inputs are not compared.
    """

    differences: list[Difference]
    num_compared: dict[Phase, int]
    num_gradients: int
    not_compared: list[str]
    has_other_layout: bool

    @property
    def verdict(self) -> Verdict:
        if not self.differences:
            return "equal"
        return "rounding" if all(each.is_rounding for each in self.differences) else "different"

    @property
    def first(self) -> Difference | None:
        """The first difference that has not the size of rounding, or else the first one."""
        beyond = (each for each in self.differences if not each.is_rounding)
        return next(beyond, self.differences[0] if self.differences else None)

    @property
    def worst(self) -> Difference | None:
        """The largest difference, in units of the yardstick where there is one."""
        return max(self.differences, key=lambda each: (each.of_yardstick or 0.0, each.relative), default=None)


def compare(plain: Recording, switched: Recording, yardstick: Recording | None = None) -> RunComparison:
    """Compare the tensors of two recordings by their bits.

    Runs that cut a step into different numbers of micro-batches are compared by the last gradients of each step, and
    by the tensors of the update.
    """
    cuts = [Counter(place.step for place in each.tensors if place.phase == "loss") for each in (plain, switched)]
    aligned = cuts[0] == cuts[1]
    first, second = (_last_of_steps(each) if not aligned else each.tensors for each in (plain, switched))
    measure = {} if yardstick is None else (yardstick.tensors if aligned else _last_of_steps(yardstick))
    lacking = _lacking(first, second)
    if not any(_is_updated(plain, place) and place in second for place in first):
        lacking.pop("gradient", None)  # no weight shows that there were gradients
    not_compared = [f"{phase}: {reason}" for phase, reason in lacking.items()]
    if not aligned:
        not_compared.append("inputs and losses: the runs cut their steps into different numbers of micro-batches")
    differences: list[Difference] = []
    num_compared = Counter[Phase]()
    for place in first | second:
        ours, theirs = first.get(place), second.get(place)
        if (ours is None or theirs is None) and (place.phase in lacking or place.phase in _HELD_ELSEWHERE):
            continue
        if ours is None and place.phase == "gradient" and place.name.startswith(_OUTSIDE_OF_MODELS):
            continue
        num_compared[place.phase] += 1
        if ours is None or theirs is None or not _same(ours, theirs):
            found = _difference(place, ours, theirs, measure.get(place), plain.precision)
            of_end = (each.place.step == place.step and each.place.phase in _OF_THE_END for each in differences)
            if place.phase in _OF_THE_END and all(of_end):
                before = switched.before(place)
                is_skipped = before is not None and theirs is not None and before.sha256 == theirs.sha256
                found = replace(found, follows_from_equal=True, of_yardstick=None if is_skipped else found.of_yardstick)
            differences.append(found)
    reshaped = list(filter(None, (_reshaped(each) for each in differences if each.place.phase == "input")))
    if reshaped:
        not_compared.append(f"inputs: {reshaped[0]}")
        differences = [each for each in differences if each.place.phase != "input"]
        del num_compared["input"]
    return RunComparison(
        differences,
        dict(num_compared),
        num_gradients=len({place.name for place in first if place.phase == "gradient" and place in second}),
        not_compared=not_compared,
        has_other_layout=not aligned or bool(reshaped),
    )


def _same(first: Fingerprint, second: Fingerprint) -> bool:
    return (first.dtype, first.shape, first.sha256) == (second.dtype, second.shape, second.sha256)


def _is_updated(plain: Recording, place: TensorPlace) -> bool:
    before = plain.before(place)
    return place.phase == "weight" and before is not None and before.sha256 != plain.tensors[place].sha256


def _reshaped(found: Difference) -> str:
    """Say how the shapes of a tensor differ; nothing where they do not."""
    if found.plain is None or found.switched is None or found.plain.shape == found.switched.shape:
        return ""
    return f"{found.place} has the shape {found.switched.shape} instead of {found.plain.shape}"


def _difference(
    place: TensorPlace,
    plain: Fingerprint | None,
    switched: Fingerprint | None,
    perturbed: Fingerprint | None,
    precision: str | None,
) -> Difference:
    if plain is None or switched is None:
        return Difference(place, plain, switched, math.inf, math.inf, None)
    relative = plain.relative(switched)
    eps = _eps(plain.dtype)
    of_yardstick = None
    if perturbed is not None:
        # One tensor can escape the change of the weights by chance, but no run is more exact than its arithmetic.
        least = max(eps, _eps(precision or plain.dtype))
        change = plain.relative(perturbed)
        of_yardstick = relative / max(change, least) if math.isfinite(change) else None
    return Difference(place, plain, switched, relative, relative / eps, of_yardstick)


def _eps(dtype: str) -> float:
    found = getattr(torch, dtype)
    if found.is_floating_point or found.is_complex:
        return torch.finfo(found).eps
    return torch.finfo(torch.float32).eps


def _lacking(first: Mapping[TensorPlace, Fingerprint], second: Mapping[TensorPlace, Fingerprint]) -> dict[Phase, str]:
    """Return the phases of which the switched run shows no tensor that the plain run has too, and the reason."""
    reasons: dict[Phase, str] = {
        "gradient": "the switched run keeps no gradients in .grad",
        "start": "the switched run holds its weights elsewhere",
        "weight": "the switched run holds its weights elsewhere",
        "optimizer": "the optimizers keep different states",
        "input": "the runs call their models with other arguments",
    }
    return {
        phase: reason
        for phase, reason in reasons.items()
        if any(place.phase == phase for place in first)
        and not any(place.phase == phase and place in first for place in second)
    }


def _last_of_steps(recording: Recording) -> dict[TensorPlace, Fingerprint]:
    """Return the start, the last gradients of each step, and the tensors of its update."""
    last: Counter[int] = Counter()
    for place in recording.tensors:
        if place.phase == "loss":  # a forward pass that nothing runs backward has inputs alone
            last[place.step] = max(last[place.step], place.micro_batch)
    return {
        TensorPlace(place.step, 0, place.phase, place.name): found
        for place, found in recording.tensors.items()
        if place.phase not in ("input", "loss") and place.micro_batch in (0, last[place.step])
    }
