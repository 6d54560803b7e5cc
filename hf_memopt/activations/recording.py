"""What a step saved and when it used it, noted while it runs and turned into a profile for the planner."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from hf_memopt.activations.profile import Profile, SavedStorage
from hf_memopt.activations.recompute import Computation
from hf_memopt.activations.residency import current_node
from hf_memopt.transfer.clock import Clock


@dataclass(frozen=True)
class Recording:
    """A profile, and what the planner does not need.

    Attributes:
        profile: the storages that autograd saved, by index, and after them those that only recomputing would save.
        sizes: bytes of the former.
        owners: names of the modules that saved them.
    """

    profile: Profile
    sizes: tuple[int, ...]
    owners: tuple[str, ...]


@dataclass
class _Event:
    """A stretch of the offloader's own work, which does not count as compute."""

    begun: Any
    ended: Any = None
    saved: int | None = None
    used: int | None = None
    node: int | None = None


class Recorder:
    """Notes one forward pass and its backward.

    Args:
        clock: of the compute stream.
        model: gives the storages' owners their names.
    """

    def __init__(self, clock: Clock, model: nn.Module | None) -> None:
        self._clock = clock
        self._names = {id(module): name for name, module in (model.named_modules() if model else ())}
        self._events: list[_Event] = []
        self._sizes: dict[int, int] = {}
        self._owners: dict[int, str] = {}
        self._indices: dict[int, int] = {}
        # Storages that nobody has saved, by key: bytes, and the first storage that could be computed from them.
        self._unsaved: dict[int, tuple[int, int]] = {}
        self._computations: dict[int, tuple[list[Any], list[int], list[Callable[[], bool]]]] = {}
        self._begun = clock.mark()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Take the time inside for the offloader's, not the model's."""
        event = _Event(self._clock.mark())
        self._events.append(event)
        try:
            yield
        finally:
            event.ended = self._clock.mark()

    @contextmanager
    def using(self, index: int) -> Iterator[None]:
        """The same for bringing back a storage that autograd unpacks."""
        with self.working():
            self._events[-1].used, self._events[-1].node = index, current_node()
            yield

    def saved(self, key: int, index: int, num_bytes: int) -> None:
        """Note that autograd saved a storage, inside of `working`."""
        self._events[-1].saved = index
        self._indices[key] = index
        self._sizes[index] = num_bytes
        self._owners[index] = _calling_module(self._names)

    def computable(self, index: int, computation: Computation) -> None:
        """Note how a storage could be computed again; keeps nothing of it but times and keys."""
        keys = []
        for source in computation.sources():
            keys.append(source.key)
            if keys[-1] not in self._indices and keys[-1] not in self._unsaved:
                self._unsaved[keys[-1]] = source.num_bytes, index
        marks = [step.recipe.marks for step in computation.steps()]
        self._computations[index] = marks, list(dict.fromkeys(keys)), computation.checks()

    def end(self) -> None:
        """Backward is over: what was modified or freed by now, as eager mode may allow, cannot be computed from."""
        self._computations = {
            index: noted
            for index, noted in self._computations.items()
            if not any(has_changed() for has_changed in noted[2])
        }

    def finish(self, ended: Any) -> Recording:
        """The profile, once backward is over; waits for the device."""
        saved_at, uses, step_s = self._times(ended)
        extra = [key for key in self._unsaved if key not in self._indices]
        indices = {**self._indices, **{key: len(self._sizes) + place for place, key in enumerate(extra)}}
        storages = [self._storage(index, saved_at, uses.get(index, [step_s]), indices) for index in self._sizes]
        for key in extra:
            num_bytes, dependent = self._unsaved[key]
            storages.append(SavedStorage(num_bytes, saved_at[dependent], ()))
        sizes = tuple(self._sizes.values())
        return Recording(Profile(tuple(storages), step_s), sizes, tuple(self._owners.values()))

    def _storage(
        self, index: int, saved_at: dict[int, float], uses: list[float], indices: dict[int, int]
    ) -> SavedStorage:
        if index not in self._computations:
            return SavedStorage(self._sizes[index], saved_at[index], tuple(uses))
        marks, keys, _ = self._computations[index]
        seconds = sum(self._clock.elapsed_s(*span) for span in marks)
        sources = tuple(indices[key] for key in keys)
        return SavedStorage(self._sizes[index], saved_at[index], tuple(uses), seconds, sources)

    def _times(self, ended: Any) -> tuple[dict[int, float], dict[int, list[float]], float]:
        """Compute seconds at each save and at the uses of each storage, and of the whole step."""
        saved_at: dict[int, float] = {}
        uses: dict[int, list[float]] = {}
        now, before, node, node_time = 0.0, self._begun, None, 0.0
        for event in self._events:
            now += self._clock.elapsed_s(before, event.begun)
            before = event.ended
            if event.saved is not None:
                saved_at[event.saved] = now
            if event.used is not None:
                # What one node unpacks is needed together.
                node_time = node_time if event.node is not None and event.node == node else now
                node = event.node
                uses.setdefault(event.used, []).append(node_time)
        return saved_at, uses, now + self._clock.elapsed_s(before, ended)


_CALL = nn.Module._call_impl.__code__


def _calling_module(names: dict[int, str]) -> str:
    """The innermost module being called. Found on the stack: hooks would make compiled modules compile again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # No other frame is looked into: reading `f_locals` makes a frame keep what is in it, for as long as it runs.
        if frame.f_code is _CALL:
            module = frame.f_locals["self"]
            return names.get(id(module), type(module).__name__)
        frame = frame.f_back
    return ""
