"""What a step saved and when it used it, noted while it runs and turned into a profile for the planner."""

import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hf_memopt.activations.device_room import DeviceRoom
from hf_memopt.activations.planner.profile import Action, Profile, SavedStorage
from hf_memopt.activations.recompute.replay import Recomputation, StoredInput
from hf_memopt.activations.saved_tensors.device_state import DeviceBytes
from hf_memopt.autograd_state import StoragePin, VersionGuard, calling_module, current_node
from hf_memopt.transfer.clock import Clock

Makers = set[weakref.ref[nn.Module] | None]


@dataclass(frozen=True)
class RecordedPass:
    """A profile, and what the planner does not need.

    Attributes:
        profile: the storages that autograd saved, by index, and after them those that only recomputing would save.
        sizes: bytes of the former.
        owners: names of the modules that saved them.
        makers: by index, the modules that performed what a storage could be computed again by, None for outside of
            modules.
        operations: by index, what a storage could be computed again by; see `Recomputation.operations`.
        lasting: indices of storages that the model keeps beyond forward anyway. They count nothing.
    """

    profile: Profile
    sizes: tuple[int, ...]
    owners: tuple[str, ...]
    makers: Mapping[int, Makers] = field(default_factory=dict)
    operations: Mapping[int, tuple[Any, ...]] = field(default_factory=dict)
    lasting: frozenset[int] = frozenset()


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
    """A source of the storage `dependent` that nobody had saved by then; `index` is set if autograd saves it later."""

    num_bytes: int
    dependent: int
    guard: VersionGuard
    num_writes: int
    index: int | None = None

    def was_modified(self, num_writes: int | None) -> bool:
        """Return whether the source has been written to, given the number of writes to its storage seen by now."""
        return self.num_writes != num_writes or self.guard.was_modified()


@dataclass
class _Computable:
    """How a storage could be computed again: the time of each operation, and what they read.

    `checks` say whether that is no longer so. They are made at the end of each backward up to the one that used the
    storage: what becomes of the operands later does not matter.
    """

    marks: list[Any]
    sources: list[int | _Unsaved]
    makers: Makers
    operations: tuple[Any, ...]
    checks: list[Callable[[], bool]] | None


class PassRecorder:
    """Notes everything that one context saved, and the backward passes through it.

    Args:
        clock: of the compute stream.
        model: gives the storages' owners their names.
        held: what saved activations hold.
        room: measures what everything else needs; None does not.
    """

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
        # The events in which storages were saved, and which of them the model has kept.
        self._placed: dict[int, int] = {}
        self._lasting: set[int] = set()
        self._indices: dict[int, int] = {}
        self._staying: set[int] = set()
        # How many events had been noted when the last saved tensor of a storage went.
        self._freed: dict[int, int] = {}
        self._unsaved: dict[int, _Unsaved] = {}
        self._all_unsaved: list[_Unsaved] = []
        self._computable: dict[int, _Computable] = {}
        # As long as these exist, no other storage is given the key of one that was noted.
        self._pins: list[StoragePin] = []
        self._begun = clock.mark()

    def name_modules(self, model: nn.Module | None) -> None:
        """Give the modules of another model their names."""
        for name, module in model.named_modules() if model is not None else ():
            self._names.setdefault(id(module), name)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Take the time inside for the offloader's, not the model's."""
        # The event is listed before the work is done: `saved` and `using` fill in what the newest event is about.
        event = _Event(self._clock.mark())
        self._events.append(event)
        # A stretch of the model's own work ends here, and the next one begins when this is left.
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
        """Take the time inside for bringing back a storage that autograd unpacks."""
        with self.working():
            self._events[-1].used, self._events[-1].node = index, current_node()
            yield

    def saved(
        self, storage: torch.UntypedStorage, index: int, stays: bool, num_writes: int | None, of_function: bool = False
    ) -> None:
        """Note that autograd saved a storage, inside of `working`.

        Args:
            storage: that a saved tensor is a view of.
            index: its place in the pass.
            stays: whether it never goes to the host.
            num_writes: how many writes to it have been seen, None where nothing is watched.
            of_function: whether a custom `autograd.Function` saved it, which gets a copy of its own.
        """
        key = storage._cdata
        self._pins.append(StoragePin.of(storage))
        self._placed[index] = len(self._events) - 1
        self._indices[key] = index
        self._sizes[index] = storage.nbytes()
        self._owners[index] = _owner(self._names)
        # Another storage could be computed from this one when nobody had saved it yet. Now autograd does save it, so
        # that the planner will know this source by its index.
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
        """Note that the model has a storage for longer than forward."""
        self._lasting.add(index)

    def not_computable(self, index: int) -> None:
        """Note that parts of a storage may have been written since it was computed."""
        self._computable.pop(index, None)

    def computable(self, index: int, computation: Recomputation) -> None:
        """Note how a storage could be computed again; keeps nothing of it but times and keys."""
        sources = [self._source(source, index) for source in computation.sources()]
        marks = [step.record.marks for step in computation.steps()]
        self._computable[index] = _Computable(
            marks, sources, computation.modules(), computation.operations(), computation.checks()
        )

    def _source(self, source: StoredInput, dependent: int) -> "int | _Unsaved":
        # The planner knows by its index what autograd has saved. Any other source would have to be saved for this
        # purpose alone, unless autograd still saves it later in the pass: see `saved`.
        if source.is_saved and source.key in self._indices:
            return self._indices[source.key]
        known = self._unsaved.get(source.key)
        if known is None or known.was_modified(source.num_writes):
            self._pins.append(source.pin())
            self._unsaved[source.key] = _Unsaved(source.num_bytes, dependent, source.guard, source.num_writes)
            self._all_unsaved.append(self._unsaved[source.key])
        return self._unsaved[source.key]

    def freed(self, index: int) -> None:
        """Note that the last saved tensor of a storage is gone."""
        self._freed[index] = len(self._events)

    def end_backward(self, mark: Any) -> None:
        """Note that a backward is over. What was modified or freed by now, as eager mode may allow, is no source."""
        # A storage that this backward has used was computable until its use, which is all that the plan needs: its
        # checks end here. The others stay under watch until their own backward.
        used = {event.used for event in self._events}
        for index, noted in list(self._computable.items()):
            if noted.checks is not None and any(has_changed() for has_changed in noted.checks):
                del self._computable[index]
            elif index in used:
                noted.checks = None
        self._events.append(_Event(mark, mark, ends_backward=True))
        self._unsaved.clear()  # who saves these from now on does so too late
        if self._room is not None:
            self._room.end(self._held.now_bytes)

    def finish(self) -> RecordedPass:
        """Return the profile; waits for the device."""
        return _Timing(self._clock, self._begun, self._events).recording(self)


class _Timing:
    """Turns events into seconds of compute: the clock stands still while the offloader itself works."""

    def __init__(self, clock: Clock, begun: Any, events: list[_Event]) -> None:
        self._clock = clock
        self._saved_at: dict[int, float] = {}
        self._uses: dict[int, list[float]] = {}
        self._ends: list[float] = []
        # The time of each event; at the end that of the last one, for what is never freed.
        self._times: list[float] = []
        # Of the sources that autograd never saved: they come after the storages that it did.
        self._unsaved_indices: dict[_Unsaved, int] = {}
        now, before, node, node_time = 0.0, begun, None, 0.0
        for event in events:
            # Only what lies between the offloader's own stretches is compute.
            now += clock.elapsed_s(before, event.begun)
            before = event.ended
            time = now
            for index in event.saved:
                self._saved_at[index] = now
            if event.used is not None:
                # What one node unpacks is needed together.
                time = node_time = node_time if event.node is not None and event.node == node else now
                node = event.node
                self._uses.setdefault(event.used, []).append(node_time)
            if event.ends_backward:
                self._ends.append(now)
                node = None
            self._times.append(time)
        self._step_s = now

    def recording(self, noted: PassRecorder) -> RecordedPass:
        unsaved = [source for source in noted._all_unsaved if source.index is None]
        self._unsaved_indices = {source: len(noted._sizes) + place for place, source in enumerate(unsaved)}
        storages = [self._storage(noted, index) for index in noted._sizes]
        for source in unsaved:
            storages.append(SavedStorage(source.num_bytes, self._times[noted._placed[source.dependent]], ()))
        profile = Profile(tuple(storages), self._step_s, tuple(self._ends[:-1]))
        makers = {index: computable.makers for index, computable in noted._computable.items()}
        operations = {index: computable.operations for index, computable in noted._computable.items()}
        sizes, owners = tuple(noted._sizes.values()), tuple(noted._owners.values())
        return RecordedPass(profile, sizes, owners, makers, operations, frozenset(self._lasting(noted)))

    def _lasting(self, noted: PassRecorder) -> set[int]:
        """Return what the model kept, by its own tensors or, where it was never left alone, by tensors of its parts."""
        return noted._lasting | (set(noted._sizes) - set(self._saved_at))

    def _storage(self, noted: PassRecorder, index: int) -> SavedStorage:
        uses = tuple(self._uses.get(index, ()))
        # A storage that backward never used needs no way back, so that nothing is kept for recomputing it.
        if index in self._lasting(noted):
            return self._lasting_storage(noted, index, uses)
        computable = noted._computable.get(index) if uses else None
        if computable is not None and not self._outlive(computable.sources, uses):
            computable = None
        return SavedStorage(
            noted._sizes[index],
            self._saved_at[index],
            uses,
            None if computable is None else sum(self._clock.elapsed_s(*span) for span in computable.marks),
            () if computable is None else tuple(dict.fromkeys(map(self._index, computable.sources))),
            self._freed_s(noted._freed.get(index), uses),
            can_offload=index not in noted._staying,
        )

    def _lasting_storage(self, noted: PassRecorder, index: int, uses: tuple[float, ...]) -> SavedStorage:
        """Return a storage whose bytes are the model's, so that keeping it holds nothing."""
        saved_at_s = self._times[noted._placed[index]]
        return SavedStorage(
            0, saved_at_s, uses, freed_s=self._freed_s(noted._freed.get(index), uses), can_offload=False
        )

    def _outlive(self, sources: list[int | _Unsaved], uses: tuple[float, ...]) -> bool:
        """Return whether autograd itself needs the saved sources no earlier than they are read to compute a storage.

        Until then writing to them is an error in the plain run, too. Later a kernel may use their memory, or the model.
        """
        backward = bisect_left(self._ends, uses[-1])
        read_s = next(used_s for used_s in uses if bisect_left(self._ends, used_s) == backward)
        saved = [source for source in sources if not isinstance(source, _Unsaved)]
        return all(max(self._uses.get(source, (-1.0,))) >= read_s for source in saved)

    def _index(self, source: int | _Unsaved) -> int:
        if isinstance(source, int):
            return source
        return self._unsaved_indices[source] if source.index is None else source.index

    def _freed_s(self, num_events: int | None, uses: tuple[float, ...]) -> float | None:
        """When memory went that did not go with its last use."""
        # `num_events` were noted before it went, so it went at the time of the last of them.
        freed_s = self._step_s if num_events is None else self._times[num_events - 1]
        return freed_s if not uses or freed_s > uses[-1] else None


def _owner(names: dict[int, str]) -> str:
    module = calling_module()
    return "" if module is None else names.get(id(module), type(module).__name__)


def scaled(recording: RecordedPass, ratio: float) -> RecordedPass:
    """Return the recording of a pass that takes `ratio` times as long."""
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
    """Return the recording with the time for which a plan has the operations noted that it is to repeat.

    They are noted in the modules that perform them, all of a module's for each storage that is computed again. So each
    of these storages takes its part of that.

    Args:
        recording: of a pass.
        num_operations: by module.
        s_per_operation: seconds for which noting one delays the pass.
    """
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
    """Return the recording of a pass in which nothing can be done but to keep what is saved."""
    recording = without_recomputing(recording)
    storages = tuple(replace(storage, can_offload=False) for storage in recording.profile.storages)
    return replace(recording, profile=replace(recording.profile, storages=storages))


def offloading_fewer(recording: RecordedPass, actions: Sequence[Action], share: float) -> RecordedPass:
    """Return the recording of a pass in which only the largest of the storages that a plan offloads can go.

    Args:
        recording: of the pass.
        actions: the plan's.
        share: how many of them can.
    """
    storages = list(recording.profile.storages)
    offloaded = [index for index, action in enumerate(actions) if action is Action.OFFLOAD]
    by_size = sorted(offloaded, key=lambda index: storages[index].num_bytes, reverse=True)
    largest = by_size[: int(share * len(by_size))]
    for index in set(range(len(storages))) - set(largest):
        storages[index] = replace(storages[index], can_offload=False)
    return replace(recording, profile=replace(recording.profile, storages=tuple(storages)))


def without_recomputing(recording: RecordedPass) -> RecordedPass:
    """Return the recording of a pass in which nothing can be computed again."""
    storages = tuple(replace(storage, recompute_s=None, sources=()) for storage in recording.profile.storages)
    return replace(recording, profile=replace(recording.profile, storages=storages), makers={})


def grown(recording: RecordedPass, sizes: list[int]) -> RecordedPass:
    """Return the recording of a pass as large as the largest seen, its times in proportion.

    Args:
        recording: of the passes so far.
        sizes: bytes of the storages that another pass saved, as many as were recorded.
    """
    largest = tuple(max(new, old) for new, old in zip(sizes, recording.sizes, strict=True))
    ratio = sum(largest) / sum(recording.sizes)
    recording = scaled(recording, ratio)
    grown_indices = set(range(len(largest))) - recording.lasting
    storages = tuple(
        replace(storage, num_bytes=largest[index] if index in grown_indices else round(ratio * storage.num_bytes))
        for index, storage in enumerate(recording.profile.storages)
    )
    return replace(recording, profile=replace(recording.profile, storages=storages), sizes=largest)
