"""Compares two recordings bit by bit, and judges differences by the rounding that these runs have anyway."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from hf_memopt.exactness.recording import Fingerprint, Phase, Recording, TensorPlace

Verdict = Literal["equal", "rounding", "small", "different"]

# Each limit lies between the largest innocent change and the smallest fault of tests/exactness/judged_changes.py.
# Multiples of the change by one rounding of all weights. The smaller one holds in lower precision, where that change is
# large; the larger one below `_SMALL_CHANGE`, since reordering a long sum can round by more than the weights do.
ROUNDINGS_ALLOWED = (6.0, 60.0)
_SMALL_CHANGE = 1e-3
# Roundings of a tensor's own dtype; and, for a gradient whose terms cancel out, of all gradients of its pass.
_OF_ARITHMETIC, _OF_CANCELLING_SUMS = 6.0, 30.0
# Largest difference between the runs in float32, as a multiple of float16's rounding. TF32 reaches half of it.
SHARE_ALLOWED = 2.4
# The same for an update where Adam makes whole ones of gradients that are noise, as a multiple of the run's rounding.
SHARE_OF_UPDATE_ALLOWED = 1.5
# Largest common factor in the gradients of a backward pass, in standard errors of chance.
ERRORS_ALLOWED = 25.0
# Factors closer to 1 than this are ignored, because rounding itself is biased.
LEAST_FACTOR = 1e-4
# So are those less than so many times as far from 1 as those of another rounding: that of a scalar output's gradient
# is a factor of the whole pass.
FACTORS_OF_ROUNDING = 5.0
# By significant bits; TF32 has as many as float16.
LOW_PRECISIONS = {8: "bfloat16", 11: "float16"}
_BITS_OF_FLOAT32 = 20
# Rounding once to a lower precision changes less than this. Where terms cancel out, few bits are left by chance.
_ROUNDED_ONCE = 0.03
# By chance, one rounding of the weights may leave a tensor with fewer elements as it was.
_FEW = 16
# Upper bound for tensors with few elements: three times this share is less than a lost update.
_OF_FEW = 1 / 6
# Leaves of which a switch may need more: a reentrant checkpoint needs an input that has a gradient.
_OUTSIDE_OF_MODELS = ("input ", "leaf ")
_OF_THE_END: tuple[Phase, ...] = ("setting", "weight", "optimizer")
# One run may hold some of them elsewhere: ZeRO-3 shows its weights first in the forward pass, and buffers at once.
_HELD_ELSEWHERE: tuple[Phase, ...] = ("start", "input", "setting", "optimizer")


@dataclass(frozen=True)
class Yardstick:
    """Runs that show how far rounding reaches. In float32 a difference by rounding vanishes, one by a fault stays."""

    plain: Recording  # from weights that are changed by one rounding, or, with `switched`, in float32
    switched: Recording | None = None  # in float32


@dataclass(frozen=True)
class Difference:
    """A tensor that differs.

    `relative`, the norm of the difference as a share of the plain tensor's norm, is estimated; it is infinite for
    tensors of other shapes, of which one run lacks one, or with elements that are not finite.
    """

    place: TensorPlace
    plain: Fingerprint | None
    switched: Fingerprint | None
    relative: float
    roundings: float  # the same in units of the precision in which the plain tensor is stored
    of_yardstick: float | None = None  # the difference in units of `unit`; None if rounding was not measured
    allowed: float = 0.0  # the largest multiple that rounding has
    unit: str = ""  # the size of rounding here, in words
    systematic: str = ""  # evidence that a difference of the size of rounding is none

    @property
    def verdict(self) -> Verdict:
        if self.of_yardstick is None or not self.of_yardstick <= self.allowed:
            return "different"
        return "small" if self.systematic else "rounding"

    @property
    def excess(self) -> float:
        """The size as a multiple of what is allowed; 0 where nothing shows that."""
        return 0.0 if self.of_yardstick is None else self.of_yardstick / self.allowed


@dataclass(frozen=True)
class RunComparison:
    """All differences between two recordings, in the order in which the plain run computed the tensors."""

    differences: list[Difference]
    num_compared: dict[Phase, int]
    num_gradients: int
    not_compared: list[str]  # tensors that could not be compared, with reasons
    has_other_layout: bool  # the switched run cuts its data in another way, or packs it, and inputs are not compared

    @property
    def verdict(self) -> Verdict:
        found = {each.verdict for each in self.differences}
        order: tuple[Verdict, ...] = ("different", "small", "rounding")
        return next((each for each in order if each in found), "equal")

    @property
    def first(self) -> Difference | None:
        """The first difference of those that decide the verdict."""
        return next((each for each in self.differences if each.verdict == self.verdict), None)

    @property
    def worst(self) -> Difference | None:
        """The largest difference, as a multiple of what is allowed where there is a yardstick."""
        return max(self.differences, key=lambda each: (each.excess, each.relative), default=None)


def compare(plain: Recording, switched: Recording, yardstick: Yardstick | None = None) -> RunComparison:
    """Compare the tensors of two recordings by their bits; without a yardstick, each difference is a fault.

    Runs that cut a step into different numbers of micro-batches are compared by the last gradients of each step, and
    by the tensors of the update.
    """
    cuts = [Counter(place.step for place in each.tensors if place.phase == "loss") for each in (plain, switched)]
    is_aligned = cuts[0] == cuts[1]
    if not is_aligned:
        plain, switched = _last_of_steps(plain), _last_of_steps(switched)
        yardstick = yardstick and Yardstick(*(each and _last_of_steps(each) for each in vars(yardstick).values()))
    first, second = plain.tensors, switched.tensors
    lacking = _lacking(first, second)
    if not any(_is_updated(plain, place) and place in second for place in first):
        lacking.pop("gradient", None)  # no weight shows that there were gradients
    not_compared = [f"{phase}: {reason}" for phase, reason in lacking.items()]
    if not is_aligned:
        not_compared.append("inputs and losses: the runs cut their steps into different numbers of micro-batches")
    gradients = [found for place, found in first.items() if place.phase == "gradient"]
    if gradients and not any(each.norm and not each.num_not_finite for each in gradients):
        not_compared.append("gradients: all of them are zero or not finite, which proves nothing")
    differences: list[Difference] = []
    num_compared = Counter[Phase]()
    for place in first | second:
        ours, theirs = first.get(place), second.get(place)
        if (ours is None or theirs is None) and (place.phase in lacking or place.phase in _HELD_ELSEWHERE):
            continue
        if ours is None and place.phase == "gradient" and place.name.startswith(_OUTSIDE_OF_MODELS):
            continue
        if theirs is None and place.phase == "gradient" and _has_same_update(plain, switched, place):
            continue  # it is freed by a hook that makes the update
        num_compared[place.phase] += 1
        if ours is None or theirs is None or not _same(ours, theirs):
            differences.append(_difference(place, ours, theirs))
    reshaped = list(filter(None, (_reshaped(each) for each in differences if each.place.phase == "input")))
    if reshaped:
        not_compared.append(f"inputs: {reshaped[0]}")
        differences = [each for each in differences if each.place.phase != "input"]
        del num_compared["input"]
    if yardstick is not None:
        differences = _Judge(plain, switched, yardstick).judged(differences, look_at_bits=is_aligned)
    return RunComparison(
        differences,
        dict(num_compared),
        num_gradients=len({place.name for place in first if place.phase == "gradient" and place in second}),
        not_compared=not_compared,
        has_other_layout=not is_aligned or bool(reshaped),
    )


class _Judge:
    """Compares the size of differences with that of rounding, and checks whether small ones are random."""

    def __init__(self, plain: Recording, switched: Recording, yardstick: Yardstick) -> None:
        self._plain, self._switched, self._rounded = plain, switched, yardstick.plain
        self._is_in_float32 = yardstick.switched is not None
        self._pair = (yardstick.plain, yardstick.switched) if yardstick.switched else (plain, switched)
        # Switches between the runs in float32 may round as float16 does, which TF32 resembles.
        self._left = _eps("float16") / _eps(plain.precision or "float32") if self._is_in_float32 else 1.0
        self._alike = defaultdict[tuple[Phase, str], list[TensorPlace]](list)
        self._squares = defaultdict[tuple[Any, ...], float](float)
        for place, each in plain.tensors.items():
            self._alike[place.phase, place.name].append(place)
            self._squares[_family(place)] += each.norm**2

    def judged(self, differences: list[Difference], look_at_bits: bool) -> list[Difference]:
        factors = self._factors([each.place for each in differences if each.place.phase == "gradient"])
        computed = (each.place.step for each in differences if each.place.phase not in _OF_THE_END)
        first_computed = min(computed, default=math.inf)
        found = []
        for each in differences:
            place, systematic = each.place, ""
            if place.phase == "gradient" and (place.step, place.micro_batch) in factors:
                factor = factors[place.step, place.micro_batch]
                systematic = f"gradients are {factor:.5g} times the plain ones, on the whole"
            elif place.phase == "gradient" and place.micro_batch == 1 and look_at_bits:
                # The gradient of a bias is a sum, which kernels may take in any precision.
                is_matrix = each.plain is not None and len(each.plain.shape) > 1
                systematic = other_precision(each) if is_matrix and each.relative < _ROUNDED_ONCE else ""
            elif place.phase == "weight":
                systematic = self._factor_of_update(place)
            sized = self._after_equal_gradients if place.step < first_computed else self._sized
            found.append(replace(sized(each), systematic=systematic))
        return found

    def _after_equal_gradients(self, found: Difference) -> Difference:
        """Compare an update with the rounding of its arithmetic: that of weights before a forward pass is larger."""
        place, (ours, theirs) = found.place, _quantities(self._plain, self._switched, found.place)
        is_skipped = place.phase == "weight" and self._switched.is_unchanged(place)
        if place.phase == "setting" or ours is None or theirs is None or is_skipped:
            return found
        ratio = _ratio(ours.distance(theirs), self._arithmetic(place))
        return replace(found, of_yardstick=ratio, allowed=1.0, unit="times the rounding of the update")

    def _sized(self, found: Difference) -> Difference:
        place = found.place
        (base, other), plain = _quantities(*self._pair, place), _quantity(self._plain, place)
        if place.phase in ("start", "setting") or base is None or other is None or plain is None:
            return found
        change = max(map(self._change, self._alike[place.phase, place.name] if plain.num_elements < _FEW else [place]))
        if not math.isfinite(change):  # a rounded run that overflows is no measure
            return found
        turned_signs = self._turned_signs(place)
        if self._is_in_float32:
            allowed = SHARE_OF_UPDATE_ALLOWED if turned_signs else SHARE_ALLOWED * self._left
            unit = f"times the rounding of {self._plain.precision}, left in float32"
        else:
            least, most = ROUNDINGS_ALLOWED
            allowed = min(max(_ratio(_SMALL_CHANGE * plain.norm, change), least), most)
            unit = "times the change by one rounding of all weights"
        noise = max(self._arithmetic(place), turned_signs * plain.norm)
        ratio = _ratio(base.distance(other), max(change, noise / allowed))
        return replace(found, of_yardstick=ratio, allowed=allowed, unit=unit)

    def _factor_of_update(self, place: TensorPlace) -> str:
        """Return a sentence if an update is a multiple of the plain one by more than rounding."""
        ours, theirs = (_quantity(each, place) for each in self._pair)
        if ours is None or theirs is None or ours.num_elements < _FEW or not 0 < ours.relative(theirs) < math.inf:
            return ""
        change = theirs.minus(ours)
        if change.norm <= self._arithmetic(place) or not ours.is_parallel(change):
            return ""
        share = ours.along(change)
        by_rounding = max(map(self._share_by_rounding, self._alike["weight", place.name]))
        if abs(share) <= max(FACTORS_OF_ROUNDING * self._left * by_rounding, LEAST_FACTOR):
            return ""
        return f"its update is {1 + share:.4g} times the plain one"

    def _share_by_rounding(self, place: TensorPlace) -> float:
        """Return how much of itself another rounding adds to a tensor of the plain run."""
        plain, rounded = _quantity(self._plain, place), _quantity(self._rounded, place)
        if plain is None or rounded is None or not math.isfinite(plain.relative(rounded)):
            return 0.0
        return abs(plain.along(rounded.minus(plain))) if plain.norm else 0.0

    def _turned_signs(self, place: TensorPlace) -> float:
        """Return the share of an update that some optimizers, such as Adam, make of elements that are noise."""
        if place.phase != "weight":
            return 0.0
        gradients = [each for each in self._alike["gradient", place.name] if each.step == place.step]
        update, weight = _quantity(self._plain, place), self._plain.before(place)
        if not gradients or update is None or weight is None:
            return 0.0
        gradient = self._plain.tensors[gradients[-1]]
        if gradient.without(weight).is_parallel(update.without(weight), 0.99):
            return 0.0  # but for weight decay, the update is a multiple of the gradient, and so is its noise
        share = max(_ratio(self._change(each), self._plain.tensors[each].norm) for each in gradients)
        of_few = min(1 / math.sqrt(self._plain.tensors[place].num_elements), _OF_FEW)
        return 3 * max(math.sqrt(min(share, 1.0)), of_few)

    def _change(self, place: TensorPlace) -> float:
        """Return by how much another rounding changes a tensor of the plain run."""
        plain, rounded = _quantity(self._plain, place), _quantity(self._rounded, place)
        return math.nan if plain is None or rounded is None else plain.distance(rounded)

    def _arithmetic(self, place: TensorPlace) -> float:
        """Return the norm of the largest difference that other arithmetic makes of equal operands."""
        plain = self._plain.tensors[place]
        exact = min(_eps(plain.dtype), _eps("float32"))
        if place.phase != "weight":
            # Where terms cancel out, as for a bias before a normalisation, nothing is left but their rounding.
            all_norms = math.sqrt(self._squares[_family(place)])
            return max(_OF_ARITHMETIC * _eps(plain.dtype) * plain.norm, _OF_CANCELLING_SUMS * exact * all_norms)
        update = _quantity(self._plain, place)
        of_update = 0.0 if update is None else update.norm  # unknown for a weight that shows no start
        return max(_eps(plain.dtype) * plain.norm, _OF_ARITHMETIC * exact * of_update)

    def _factors(self, places: Sequence[TensorPlace]) -> dict[tuple[int, int], float]:
        """Return the factors by backward pass where differences of gradients lie along them, beyond chance."""
        by_rounding = [abs(share) for share, _ in _shares(self._plain, self._rounded, places).values()]
        least = max(FACTORS_OF_ROUNDING * self._left * max(by_rounding, default=0.0), LEAST_FACTOR)
        shares = _shares(*self._pair, places)
        return {
            key: 1 + share for key, (share, error) in shares.items() if abs(share) > max(ERRORS_ALLOWED * error, least)
        }


def _shares(
    plain: Recording, other: Recording, places: Iterable[TensorPlace]
) -> dict[tuple[int, int], tuple[float, float]]:
    """Return by backward pass how much of its gradients the other run adds to all of them, and the standard error.

    By chance the share of a gradient in its difference has, from sketches of m sums, a standard error of the relative
    difference divided by the root of m. Shares are averaged with the inverse squares of these as weights.
    """
    sums = defaultdict[tuple[int, int], list[float]](lambda: [0.0, 0.0])
    for place in places:
        ours, theirs = plain.tensors.get(place), other.tensors.get(place)
        if ours is not None and theirs is not None and 0 < ours.relative(theirs) < math.inf:
            weight = len(ours.sketch) / ours.relative(theirs) ** 2
            of_pass = sums[place.step, place.micro_batch]
            of_pass[0] += weight * ours.along(theirs.minus(ours))
            of_pass[1] += weight
    return {key: (along / weight, 1 / math.sqrt(weight)) for key, (along, weight) in sums.items()}


def _quantity(recording: Recording, place: TensorPlace) -> Fingerprint | None:
    """Return what is judged at a place: of a weight, its update."""
    found, before = recording.tensors.get(place), recording.before(place)
    if place.phase != "weight" or found is None:
        return found
    return None if before is None or before.shape != found.shape else found.minus(before)


def _quantities(
    plain: Recording, switched: Recording, place: TensorPlace
) -> tuple[Fingerprint | None, Fingerprint | None]:
    """Return what is judged of two runs; the weights themselves if either shows no start, as under ZeRO-3."""
    found = _quantity(plain, place), _quantity(switched, place)
    return found if None not in found else (plain.tensors.get(place), switched.tensors.get(place))


def _family(place: TensorPlace) -> tuple[Any, ...]:
    """Return what all gradients of a pass, or all states of a kind, have in common."""
    kind = place.name.partition(" of ")[0] if place.phase == "optimizer" else place.name
    return place.step, place.micro_batch, place.phase, "" if place.phase == "gradient" else kind


def _ratio(size: float, unit: float) -> float:
    return size / unit if unit else math.inf if size else 0.0


def other_precision(found: Difference) -> str:
    """Return a sentence if the elements of one tensor alone have the few significant bits of a lower precision."""
    if found.plain is None or found.switched is None or found.plain.dtype != found.switched.dtype:
        return ""
    ours, theirs = found.plain.num_bits, found.switched.num_bits
    if min(ours, theirs) not in LOW_PRECISIONS or max(ours, theirs) < _BITS_OF_FLOAT32:
        return ""
    return f"its elements have {theirs} significant bits instead of {ours}"


def _same(first: Fingerprint, second: Fingerprint) -> bool:
    return (first.dtype, first.shape, first.sha256) == (second.dtype, second.shape, second.sha256)


def _is_updated(plain: Recording, place: TensorPlace) -> bool:
    return place.phase == "weight" and plain.before(place) is not None and not plain.is_unchanged(place)


def _has_same_update(plain: Recording, switched: Recording, gradient: TensorPlace) -> bool:
    place = replace(gradient, micro_batch=0, phase="weight")
    ours, theirs = plain.tensors.get(place), switched.tensors.get(place)
    return ours is not None and theirs is not None and _same(ours, theirs) and _is_updated(plain, place)


def _reshaped(found: Difference) -> str:
    """Say how the shapes of a tensor differ; nothing where they do not."""
    if found.plain is None or found.switched is None or found.plain.shape == found.switched.shape:
        return ""
    return f"{found.place} has the shape {found.switched.shape} instead of {found.plain.shape}"


def _difference(place: TensorPlace, plain: Fingerprint | None, switched: Fingerprint | None) -> Difference:
    if plain is None or switched is None:
        return Difference(place, plain, switched, math.inf, math.inf)
    relative = plain.relative(switched)
    return Difference(place, plain, switched, relative, relative / _eps(plain.dtype))


def _eps(dtype: str) -> float:
    found = getattr(torch, dtype)
    return torch.finfo(found if found.is_floating_point or found.is_complex else torch.float32).eps


def _lacking(first: Mapping[TensorPlace, Fingerprint], second: Mapping[TensorPlace, Fingerprint]) -> dict[Phase, str]:
    """Return the phases of which the switched run shows no tensor that the plain run has too, and the reason."""
    reasons: dict[Phase, str] = {
        "gradient": "the switched run keeps no gradients in .grad",
        "start": "the switched run holds its weights elsewhere",
        "weight": "the switched run holds its weights elsewhere",
        "optimizer": "the optimizers keep different states",
        "input": "the runs call their models with other arguments",
        "setting": "the optimizers have other options",
    }
    return {
        phase: reason
        for phase, reason in reasons.items()
        if any(place.phase == phase for place in first)
        and not any(place.phase == phase and place in first for place in second)
    }


def _last_of_steps(recording: Recording) -> Recording:
    """Return the start, the last gradients of each step, and the tensors of its update."""
    last: Counter[int] = Counter()
    for place in recording.tensors:
        if place.phase == "loss":  # a forward pass that nothing runs backward has inputs alone
            last[place.step] = max(last[place.step], place.micro_batch)
    tensors = {
        TensorPlace(place.step, 0, place.phase, place.name): found
        for place, found in recording.tensors.items()
        if place.phase not in ("input", "loss") and place.micro_batch in (0, last[place.step])
    }
    return replace(recording, tensors=tensors)
