"""The order in which runs are recorded and compared."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from hf_memopt.exactness.comparison import compare
from hf_memopt.exactness.recording import Recording
from hf_memopt.exactness.report import RunFigures, VerifyReport, report_of

Kind = Literal["plain", "plain again", "switched", "plain, rounded once"]


def compare_runs(record: Callable[[Kind, str | None], Recording]) -> VerifyReport:
    """Compare a plain run with itself, then with the switched one; where they differ, measure by a rounded run.

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
    again = recorded("plain again")
    control = compare(plain, again)
    if control.differences:
        return report_of(plain, again, control, runs, is_control=True)
    switched = recorded("switched")
    comparison = compare(plain, switched)
    if comparison.differences:
        rounded = recorded("plain, rounded once", plain.precision or "float64")  # or the weights' own, if coarser
        comparison = compare(plain, switched, rounded)
    return report_of(plain, switched, comparison, runs, is_control=False)


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
