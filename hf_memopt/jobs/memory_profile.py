"""Memory over a step in a few parts, by its use: savings meet each other there, and not at the peak."""

from collections import Counter
from collections.abc import Mapping
from itertools import groupby

from hf_memopt.estimate.accounting.categories import UNUSED
from hf_memopt.estimate.estimate_report import MemoryEstimate

# A phase and a number within it, and the bytes of each use.
Part = tuple[str, int]
MemoryProfile = Mapping[Part, Mapping[str, int]]

_PARTS_OF_PHASE = 8


def memory_profile(estimate: MemoryEstimate) -> MemoryProfile:
    """Return what is held at the fullest moment of each part of the last run of each phase.

    All parts of a phase have equally many changes.
    """
    trace, held = estimate.trace, estimate.trace.held()
    moments = _fullest_moments(trace.phases, held, trace.first_step)
    profile: dict[Part, Mapping[str, int]] = {}
    alive: Counter[str] = Counter()
    for position, (storage, change) in enumerate(zip(trace.storages, trace.changes, strict=True)):
        alive[estimate.storage_kinds[storage]] += change
        for part in moments.get(position, ()):
            profile[part] = {**alive, UNUSED: held[position] - alive.total()}
    return profile


def _fullest_moments(phases: tuple[str, ...], held: list[int], first_step: int) -> dict[int, list[Part]]:
    runs = {phase: list(run) for phase, run in groupby(range(first_step, len(held)), key=phases.__getitem__)}
    moments: dict[int, list[Part]] = {}
    for phase, run in runs.items():
        for number in range(_PARTS_OF_PHASE):
            part = run[number * len(run) // _PARTS_OF_PHASE :][: -(-len(run) // _PARTS_OF_PHASE)]
            moments.setdefault(max(part, key=held.__getitem__), []).append((phase, number))
    return moments
