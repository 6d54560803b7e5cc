"""The profile of a recorded pass, and its changes when passes turn out otherwise."""

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from hf_memopt.activations.planner.profile import Action, Profile

Makers = set[weakref.ref[nn.Module] | None]


@dataclass(frozen=True)
class RecordedPass:
    """A profile, and details of the recorded pass that the planner does not need.

    Attributes:
        profile: the storages that autograd saved, by index, and after them those that only recomputing would save.
        sizes: bytes of the former.
        owners: names of the modules that saved them.
        makers: by index, the modules whose operations could compute a storage again, None for outside of modules.
        operations: by index, the operations that could compute a storage again; see `Recomputation.operations`.
        lasting: indices of storages that the model keeps beyond forward anyway. They count nothing.
    """

    profile: Profile
    sizes: tuple[int, ...]
    owners: tuple[str, ...]
    makers: Mapping[int, Makers] = field(default_factory=dict)
    operations: Mapping[int, tuple[Any, ...]] = field(default_factory=dict)
    lasting: frozenset[int] = frozenset()


def scaled(recording: RecordedPass, ratio: float) -> RecordedPass:
    profile = recording.profile
    storages = tuple(
        replace(
            storage,
            saved_at_s=ratio * storage.saved_at_s,
            uses_s=tuple(ratio * used_at for used_at in storage.uses_s),
            recompute_s=None if storage.recompute_s is None else ratio * storage.recompute_s,
            freed_s=None if storage.freed_s is None else ratio * storage.freed_s,
        )
        for storage in profile.storages
    )
    ends_s = tuple(ratio * end_s for end_s in profile.backward_ends_s)
    return replace(recording, profile=Profile(storages, ratio * profile.step_s, ends_s))


def with_cost_of_noting(
    recording: RecordedPass, num_operations: Mapping[weakref.ref[nn.Module] | None, int], s_per_operation: float
) -> RecordedPass:
    """Return the recording with the time of noting the operations that a plan repeats, `s_per_operation` for each."""
    # A module's operations are all noted, whichever of its storages is computed again: each of these takes its part.
    num_sharing = Counter(maker for makers in recording.makers.values() for maker in makers)

    def cost_s(index: int) -> float:
        makers = recording.makers.get(index, ())
        return s_per_operation * sum(num_operations.get(maker, 0) / num_sharing[maker] for maker in makers)

    storages = tuple(
        storage if storage.recompute_s is None else replace(storage, recompute_s=storage.recompute_s + cost_s(index))
        for index, storage in enumerate(recording.profile.storages)
    )
    return replace(recording, profile=replace(recording.profile, storages=storages))


def keeping_everything(recording: RecordedPass) -> RecordedPass:
    recording = without_recomputing(recording)
    storages = tuple(replace(storage, can_offload=False) for storage in recording.profile.storages)
    return replace(recording, profile=replace(recording.profile, storages=storages))


def offloading_fewer(recording: RecordedPass, actions: Sequence[Action], share: float) -> RecordedPass:
    """Return the recording of a pass in which only the largest of the offloaded storages can go, a `share` of them."""
    storages = list(recording.profile.storages)
    offloaded = [index for index, action in enumerate(actions) if action is Action.OFFLOAD]
    by_size = sorted(offloaded, key=lambda index: storages[index].num_bytes, reverse=True)
    largest = by_size[: int(share * len(by_size))]
    for index in set(range(len(storages))) - set(largest):
        storages[index] = replace(storages[index], can_offload=False)
    return replace(recording, profile=replace(recording.profile, storages=tuple(storages)))


def without_recomputing(recording: RecordedPass) -> RecordedPass:
    storages = tuple(replace(storage, recompute_s=None, sources=()) for storage in recording.profile.storages)
    return replace(recording, profile=replace(recording.profile, storages=storages), makers={})


def grown(recording: RecordedPass, sizes: list[int]) -> RecordedPass:
    """Return the recording of a pass as large as the largest seen, its times in proportion."""
    largest = tuple(max(new, old) for new, old in zip(sizes, recording.sizes, strict=True))
    ratio = sum(largest) / sum(recording.sizes)
    recording = scaled(recording, ratio)
    grown_indices = set(range(len(largest))) - recording.lasting
    storages = tuple(
        replace(storage, num_bytes=largest[index] if index in grown_indices else round(ratio * storage.num_bytes))
        for index, storage in enumerate(recording.profile.storages)
    )
    return replace(recording, profile=replace(recording.profile, storages=storages), sizes=largest)
