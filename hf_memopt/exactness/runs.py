"""The order in which runs are recorded and compared."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from hf_memopt.exactness.comparison import LOW_PRECISIONS, Yardstick, compare
from hf_memopt.exactness.recording import Recording
from hf_memopt.exactness.report import STAYS_ON, RunFigures, VerifyReport, report_of

Kind = Literal["plain", "plain again", "switched", "plain, in float32", "switched, in float32", "plain, rounded once"]


def is_switched(kind: Kind) -> bool:
    return kind.startswith("switched")


def is_in_float32(kind: Kind) -> bool:
    return kind.endswith("in float32")


def compare_runs(record: Callable[[Kind, str | None], Recording]) -> VerifyReport:
    """Compare a plain run with a switched one, and with itself after that; where they differ, by a yardstick.

    Runs in lower precision are made again in float32, where rounding vanishes. If that is not possible, or they
    compute in float32 already, the plain run is made again from weights that are changed by one rounding.

    `record` makes a run of a kind and returns its recording. To a run that is rounded it gets the name of the dtype to
    whose last place each weight is changed.
    """
    runs: list[RunFigures] = []

    def recorded(kind: Kind, dtype: str | None = None) -> Recording:
        found = record(kind, dtype)
        step_s = found.step_s[-1] if found.step_s else None
        runs.append(RunFigures(kind, found.peak_bytes, step_s, found.recording_s))
        return found

    plain = recorded("plain")
    switched = recorded("switched")
    again = recorded("plain again")
    control = compare(plain, again)
    if control.differences:
        report = report_of(plain, again, control, runs, is_control=True)
        return report if compare(switched, again).differences else replace(report, advice=STAYS_ON)
    comparison = compare(plain, switched)
    if comparison.differences:
        yardstick, dtype, reason = None, _dtype_of_gradients(plain), ""
        if plain.precision is not None:
            yardstick, dtype, reason = _in_float32(plain, plain.precision, recorded)
        comparison = compare(plain, switched, yardstick or Yardstick(recorded("plain, rounded once", dtype)))
        comparison.not_compared.extend([reason] if reason else [])
    return report_of(plain, switched, comparison, runs, is_control=False)


def _dtype_of_gradients(plain: Recording) -> str:
    """Return the lower precision that gradients show where a program casts weights itself, or else float64.

    Weights whose own dtype is coarser are rounded to that one.
    """
    first = (each for place, each in plain.tensors.items() if place.phase == "gradient" and place.micro_batch == 1)
    bits = [each.num_bits for each in first if len(each.shape) > 1 and each.num_bits]
    return LOW_PRECISIONS.get(statistics.median_low(bits), "float64") if bits else "float64"


def _in_float32(
    plain: Recording, precision: str, recorded: Callable[[Kind], Recording]
) -> tuple[Yardstick | None, str, str]:
    """Return the runs in float32, or else the dtype in which the plain run computes, and the reason."""
    found = None
    try:
        found = recorded("plain, in float32")
        if not compare(plain, found).differences:  # an autocast that has nothing to cast
            return None, _dtype_of_gradients(plain), ""
        bits = [each.num_bits for place, each in found.tensors.items() if place.phase == "gradient"]
        if not bits or statistics.median(bits) < max(LOW_PRECISIONS) + 1:
            return None, precision, "in float32: weights, or what computes with them, have a lower precision"
        return Yardstick(found, recorded("switched, in float32")), precision, ""
    except Exception as error:  # a program may rely on the lower precision
        return None if found is None else Yardstick(found), precision, f"in float32: {type(error).__name__}: {error}"


def merged(ranks: list[Recording]) -> Recording:
    """Return one recording of all processes of a run; memory and time are the largest, names tell the rank.

    Tensors are in the order of steps, so that the first that differs is the first of all ranks.
    """
    by_rank = [
        (replace(place, name=f"rank {rank}: {place.name}") if rank else place, found)
        for rank, recording in enumerate(ranks)
        for place, found in recording.tensors.items()
    ]
    tensors = dict(sorted(by_rank, key=lambda each: each[0].order))
    peaks = [each.peak_bytes for each in ranks if each.peak_bytes is not None]
    return replace(
        ranks[0],
        tensors=tensors,
        has_dropout=any(each.has_dropout for each in ranks),
        not_deterministic=sorted({operation for each in ranks for operation in each.not_deterministic}),
        peak_bytes=max(peaks, default=None),
        step_s=[max(times) for times in zip(*(each.step_s for each in ranks), strict=False)],
        recording_s=max(each.recording_s for each in ranks),
    )
