"""Records a pass: sizes and times of saves and uses, as a profile for the planner, which changes with later passes."""

import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hf_memopt.activations.plan_maker import DeviceRoom
from hf_memopt.activations.planner.profile import Action, Profile, SavedStorage
from hf_memopt.activations.recompute.replay import Recomputation, StoredInput
from hf_memopt.activations.saved_tensors.device_state import DeviceBytes
from hf_memopt.autograd_state import StoragePin, VersionGuard, calling_module, current_node
from hf_memopt.transfer.clock import Clock

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


@dataclass
class _Event:
    """A stretch of the offloader's own work, which does not count as compute."""

    begun: Any
    ended: Any = None
    saved: list[int] = field(default_factory=list)
    used: int | None = None
    node: int | None = None
    ends_backward: bool = False


@dataclass(eq=False)
class _Unsaved:
    """A source of the storage `dependent` not saved by then; `index` is set if autograd saves it later."""

    num_bytes: int
    dependent: int
    guard: VersionGuard
    num_writes: int
    index: int | None = None

    def was_modified(self, num_writes: int | None) -> bool:
        return self.num_writes != num_writes or self.guard.was_modified()


@dataclass
class _Computable:
    """The operations that could compute a storage again: their times, and the sources that they read.

    `checks` say whether it has changed, until the backward that used the storage ends: later writes do not matter.
    """

    marks: list[Any]
    sources: list[int | _Unsaved]
    makers: Makers
    operations: tuple[Any, ...]
    checks: list[Callable[[], bool]] | None

    def source_indices(self, unsaved_indices: "dict[_Unsaved, int]") -> tuple[int, ...]:
        indices = [unsaved_indices[source] if isinstance(source, _Unsaved) else source for source in self.sources]
        return tuple(dict.fromkeys(indices))


class PassRecorder:
    def __init__(
        self, clock: Clock, model: nn.Module | None, held: DeviceBytes, room: DeviceRoom | None = None
    ) -> None:
        self._clock = clock
        self._held, self._room = held, room
        if room is not None:
            room.begin()
        self._names = {id(module): name for name, module in (model.named_modules() if model else ())}
        self._events: list[_Event] = []
        self._sizes: dict[int, int] = {}
        self._owners: dict[int, str] = {}
        # The events in which storages were saved, and the storages that the model has kept.
        self._placed: dict[int, int] = {}
        self._lasting: set[int] = set()
        self._indices: dict[int, int] = {}
        self._staying: set[int] = set()
        # Events noted when the last saved tensor of a storage went.
        self._freed: dict[int, int] = {}
        self._unsaved: dict[int, _Unsaved] = {}
        self._all_unsaved: list[_Unsaved] = []
        self._computable: dict[int, _Computable] = {}
        # While these exist, no other storage is given the key of one that was noted.
        self._pins: list[StoragePin] = []
        self._begun = clock.mark()

    def name_modules(self, model: nn.Module | None) -> None:
        for name, module in model.named_modules() if model is not None else ():
            self._names.setdefault(id(module), name)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Take the time inside for the offloader's, not the model's."""
        # Listed before the work is done: `saved` and `using` fill in its subject.
        event = _Event(self._clock.mark())
        self._events.append(event)
        # A stretch of the model's own work ends here.
        if self._room is not None:
            self._room.sample(self._held.now_bytes)
        try:
            yield
        finally:
            if self._room is not None:
                self._room.restart()
            event.ended = self._clock.mark()

    @contextmanager
    def using(self, index: int) -> Iterator[None]:
        with self.working():
            self._events[-1].used, self._events[-1].node = index, current_node()
            yield

    def saved(
        self, storage: torch.UntypedStorage, index: int, stays: bool, num_writes: int | None, of_function: bool = False
    ) -> None:
        """Note, inside of `working`, that autograd saved a storage; one that `stays` never leaves the device."""
        key = storage._cdata
        self._pins.append(StoragePin.of(storage))
        self._placed[index] = len(self._events) - 1
        self._indices[key] = index
        self._sizes[index] = storage.nbytes()
        module = calling_module()
        self._owners[index] = "" if module is None else self._names.get(id(module), type(module).__name__)
        # A source that another storage could be computed from is saved now: the planner will know it by its index.
        if key in self._unsaved and not of_function:
            source = self._unsaved.pop(key)
            if not source.was_modified(num_writes):
                source.index = index
        if stays:
            self._staying.add(index)

    def begun(self, index: int) -> None:
        """Note, inside of `working`, that a storage is the model's no more, or is dealt with while it still is."""
        self._events[-1].saved.append(index)

    def lasts(self, index: int) -> None:
        self._lasting.add(index)

    def not_computable(self, index: int) -> None:
        """Note that parts of a storage may have been written since it was computed."""
        self._computable.pop(index, None)

    def computable(self, index: int, computation: Recomputation) -> None:
        """Note the computation of a storage; keeps nothing of it but times and keys."""
        sources = [self._source(source, index) for source in computation.sources()]
        marks = [step.record.marks for step in computation.steps()]
        self._computable[index] = _Computable(
            marks, sources, computation.modules(), computation.operations(), computation.checks()
        )

    def _source(self, source: StoredInput, dependent: int) -> "int | _Unsaved":
        # Any other source would have to be saved for this purpose alone, unless autograd still saves it: see `saved`.
        if source.is_saved and source.key in self._indices:
            return self._indices[source.key]
        known = self._unsaved.get(source.key)
        if known is None or known.was_modified(source.num_writes):
            self._pins.append(source.pin())
            self._unsaved[source.key] = _Unsaved(source.num_bytes, dependent, source.guard, source.num_writes)
            self._all_unsaved.append(self._unsaved[source.key])
        return self._unsaved[source.key]

    def freed(self, index: int) -> None:
        self._freed[index] = len(self._events)

    def end_backward(self, mark: Any) -> None:
        """Note that a backward is over. Operands modified or freed by now, as eager mode may allow, are no sources."""
        # Checks of a storage that this backward has used end here: it was computable until its use.
        used = {event.used for event in self._events}
        for index, noted in list(self._computable.items()):
            if noted.checks is not None and any(has_changed() for has_changed in noted.checks):
                del self._computable[index]
            elif index in used:
                noted.checks = None
        self._events.append(_Event(mark, mark, ends_backward=True))
        self._unsaved.clear()  # too late to be saved from now on
        if self._room is not None:
            self._room.end(self._held.now_bytes)

    def finish(self) -> RecordedPass:
        """Return the profile; waits for the device."""
        times = _Times(self._clock, self._begun, self._events)
        # Sources that autograd never saved come last.
        unsaved = [source for source in self._all_unsaved if source.index is None]
        indices = {source: source.index for source in self._all_unsaved if source.index is not None}
        indices |= {source: len(self._sizes) + place for place, source in enumerate(unsaved)}
        # Never left alone: tensors of the model's parts kept a storage.
        lasting = self._lasting | (self._sizes.keys() - times.saved_s.keys())
        storages = [
            self._lasting_storage(index, times) if index in lasting else self._storage(index, times, indices)
            for index in self._sizes
        ]
        for source in unsaved:
            storages.append(SavedStorage(source.num_bytes, times.events_s[self._placed[source.dependent]], ()))
        return RecordedPass(
            Profile(tuple(storages), times.step_s, tuple(times.backward_ends_s[:-1])),
            tuple(self._sizes.values()),
            tuple(self._owners.values()),
            {index: computable.makers for index, computable in self._computable.items()},
            {index: computable.operations for index, computable in self._computable.items()},
            frozenset(lasting),
        )

    def _storage(self, index: int, times: "_Times", unsaved_indices: dict[_Unsaved, int]) -> SavedStorage:
        uses_s = times.uses_of(index)
        # One that backward never used needs no way back.
        computable = self._computable.get(index) if uses_s else None
        if computable is not None:
            saved = [source for source in computable.sources if not isinstance(source, _Unsaved)]
            computable = computable if times.outlive(saved, uses_s) else None
        return SavedStorage(
            self._sizes[index],
            times.saved_s[index],
            uses_s,
            None if computable is None else sum(self._clock.elapsed_s(*span) for span in computable.marks),
            () if computable is None else computable.source_indices(unsaved_indices),
            times.freed_s(self._freed.get(index), uses_s),
            can_offload=index not in self._staying,
        )

    def _lasting_storage(self, index: int, times: "_Times") -> SavedStorage:
        """Return a storage whose bytes are the model's, so that keeping it holds nothing."""
        uses_s = times.uses_of(index)
        freed_s = times.freed_s(self._freed.get(index), uses_s)
        return SavedStorage(0, times.events_s[self._placed[index]], uses_s, freed_s=freed_s, can_offload=False)


class _Times:
    """Times of events, in seconds of compute: the clock stands still while the offloader itself works."""

    def __init__(self, clock: Clock, begun: Any, events: list[_Event]) -> None:
        self.saved_s: dict[int, float] = {}
        self.backward_ends_s: list[float] = []
        self.events_s: list[float] = []
        self._uses_s: dict[int, list[float]] = {}
        now, before, node, node_time = 0.0, begun, None, 0.0
        for event in events:
            now += clock.elapsed_s(before, event.begun)
            before = event.ended
            time = now
            for index in event.saved:
                self.saved_s[index] = now
            if event.used is not None:
                # Storages that one node unpacks are needed together.
                time = node_time = node_time if event.node is not None and event.node == node else now
                node = event.node
                self._uses_s.setdefault(event.used, []).append(node_time)
            if event.ends_backward:
                self.backward_ends_s.append(now)
                node = None
            self.events_s.append(time)
        self.step_s = now

    def uses_of(self, index: int) -> tuple[float, ...]:
        return tuple(self._uses_s.get(index, ()))

    def outlive(self, sources: list[int], uses_s: tuple[float, ...]) -> bool:
        """Return whether autograd needs the saved sources no earlier than they are read to compute a storage.

        Until then writing to them is an error in the plain run, too; later a kernel or the model may use their memory.
        """
        backward = bisect_left(self.backward_ends_s, uses_s[-1])
        read_s = next(used_s for used_s in uses_s if bisect_left(self.backward_ends_s, used_s) == backward)
        return all(max(self._uses_s.get(source, (-1.0,))) >= read_s for source in sources)

    def freed_s(self, num_events: int | None, uses_s: tuple[float, ...]) -> float | None:
        """Return when memory went that did not go with its last use; `num_events` were noted by then, None if never."""
        freed_s = self.step_s if num_events is None else self.events_s[num_events - 1]
        return freed_s if not uses_s or freed_s > uses_s[-1] else None
