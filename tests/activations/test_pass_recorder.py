"""Tests of recorded passes: times without the offloader's own work, sources by index, and passes that grow."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_memopt.activations import pass_recorder
from hf_memopt.activations.pass_recorder import PassRecorder, RecordedPass, grown, scaled
from hf_memopt.activations.planner.profile import Profile, SavedStorage
from hf_memopt.activations.saved_tensors.device_state import DeviceBytes
from hf_memopt.autograd_state import StoragePin, VersionGuard
from hf_memopt.transfer.clock import HostClock


class Clock(HostClock):
    """A clock that advances on demand, in whole seconds."""

    now_s = 0.0

    def mark(self) -> float:
        return self.now_s


class Pass:
    """A pass in which each save and each use costs the offloader ten seconds."""

    def __init__(self, model: nn.Module | None = None, room: Any = None) -> None:
        self.clock = Clock()
        self.held = DeviceBytes()
        self.recorder = PassRecorder(self.clock, model, self.held, room)
        self.storages: list[torch.UntypedStorage] = []

    def compute(self, seconds: float) -> "Pass":
        self.clock.now_s += seconds
        return self

    def save(self, stays: bool = False, storage: torch.UntypedStorage | None = None) -> "Pass":
        self.storages.append(torch.zeros(4).untyped_storage() if storage is None else storage)
        with self.recorder.working():
            self.recorder.saved(self.storages[-1], len(self.storages) - 1, stays, num_writes=0)
            self.recorder.begun(len(self.storages) - 1)
            self.compute(10)
        return self

    def use(self, index: int) -> "Pass":
        with self.recorder.using(index):
            self.compute(10)
        return self

    def end_backward(self) -> "Pass":
        self.recorder.end_backward(self.clock.mark())
        return self

    def computable(self, index: int, *sources: Any, **facts: Any) -> "Pass":
        """Record that a storage is computable, by one operation of half a second unless `facts` differ."""
        steps = [SimpleNamespace(record=SimpleNamespace(marks=(1.0, 1.5)))]
        facts = {"steps": steps, "modules": set(), "operations": ("sin",), "checks": [], **facts}
        known = {name: lambda value=value: value for name, value in facts.items()}
        self.recorder.computable(index, SimpleNamespace(sources=lambda: list(sources), **known))
        return self

    def profile(self) -> Profile:
        return self.recorder.finish().profile


def source(storage: torch.UntypedStorage, live: bool) -> Any:
    """Return an operand that is read from a storage, which autograd has saved if `live`."""
    return SimpleNamespace(
        key=storage._cdata,
        is_saved=live,
        num_bytes=storage.nbytes(),
        pin=lambda: storage,
        guard=VersionGuard(torch.empty(0).set_(storage)),
        num_writes=0,
    )


# ------------------------------------------------------------------------------------------------ times


def test_the_offloaders_own_work_takes_no_time() -> None:
    found = Pass().compute(1).save().compute(2).save().compute(4).use(1).compute(8).use(0).compute(16).end_backward()
    first, second = (profile := found.profile()).storages
    assert (first.saved_at_s, second.saved_at_s) == (1, 3)
    assert (first.uses_s, second.uses_s) == ((15,), (7,))
    assert (profile.step_s, profile.backward_ends_s) == (31, ())
    assert (first.num_bytes, first.can_offload, first.recompute_s) == (16, True, None)


def test_what_stays_is_never_offloaded() -> None:
    found = Pass().save(stays=True).save().use(0).use(1).end_backward().profile()
    assert [storage.can_offload for storage in found.storages] == [False, True]


def test_what_one_node_unpacks_is_needed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = iter((7, 7, 8, None, None, 7))
    monkeypatch.setattr(pass_recorder, "current_node", lambda: next(nodes))
    found = Pass().save()
    for _ in range(6):
        found.compute(1).use(0)
    assert found.end_backward().profile().storages[0].uses_s == (1, 1, 3, 4, 5, 6)


def test_a_node_of_another_backward_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_recorder, "current_node", lambda: 7)
    found = Pass().save().compute(1).use(0).end_backward().compute(2).use(0).compute(4).end_backward().profile()
    assert found.storages[0].uses_s == (1, 3)
    assert (found.backward_ends_s, found.step_s) == ((1,), 7)


def test_memory_that_goes_with_the_last_use_needs_no_time_of_its_own() -> None:
    found = Pass().save().save().save().save().save()
    found.compute(1).recorder.freed(4)  # a tensor dropped before backward counts until the last event, a save
    found.compute(1).use(0).recorder.freed(0)
    found.use(1).compute(2).use(2).recorder.freed(1)
    found.end_backward()
    used, late, retained, unused, dropped = found.profile().storages
    assert (used.freed_s, late.freed_s) == (None, 4)
    assert retained.freed_s is None  # the last use ends the step
    assert unused.freed_s == found.profile().step_s == 4
    assert dropped.freed_s == 0


def test_a_retained_graph_is_freed_at_the_end_of_the_step() -> None:
    found = Pass().save().use(0).compute(2).end_backward().profile()
    assert found.storages[0].freed_s == found.step_s == 2


# ------------------------------------------------------------------------------------------------ owners


class Saving(nn.Module):
    def forward(self, found: Pass) -> Pass:
        return found.save()


def test_owners_are_called_as_the_model_calls_them() -> None:
    model = nn.ModuleDict({"inner": Saving()})
    found = Pass(model)
    Saving()(model["inner"](found)).save()
    assert found.recorder.finish().owners == ("inner", "Saving", "")


# ------------------------------------------------------------------------------------------------ recomputing


def test_sources_are_known_by_the_index_that_autograd_gives_them() -> None:
    found = Pass().save()
    lasting, saved_later, saved_too_late = (torch.zeros(size).untyped_storage() for size in (8, 4, 4))
    found.compute(1).save()
    found.computable(1, source(found.storages[0], live=True), source(lasting, live=False), source(lasting, live=False))
    found.compute(1).save().computable(2, source(saved_later, live=False), source(saved_too_late, live=False))
    found.save(storage=saved_later)
    found.use(2).use(3).use(1).use(0).end_backward()
    found.save(storage=saved_too_late).use(4).end_backward()
    result = found.recorder.finish()
    storages = result.profile.storages
    assert [storage.sources for storage in storages] == [(), (0, 5), (3, 6), (), (), (), ()]
    assert [storage.num_bytes for storage in storages[5:]] == [32, 16]
    assert [(storage.saved_at_s, storage.uses_s) for storage in storages[5:]] == [(1, ()), (2, ())]
    assert result.sizes == (16,) * 5  # without storages that only recomputation would save


def test_a_source_that_autograd_has_let_go_of_would_have_to_be_saved_again() -> None:
    found = Pass().save().compute(1).save()
    found.computable(1, source(found.storages[0], live=False)).use(1).end_backward()
    assert [storage.sources for storage in found.profile().storages] == [(), (2,), ()]


def test_a_pass_that_goes_on_after_it_was_taken_for_over_is_recorded_as_a_whole() -> None:
    """Run a second backward after the next pass has begun."""
    found = Pass().save().compute(1).save()
    found.computable(1, source(torch.zeros(8).untyped_storage(), live=False)).use(1).end_backward()
    assert [storage.sources for storage in found.profile().storages] == [(), (2,), ()]
    found.save().use(0).end_backward()
    assert [storage.sources for storage in found.profile().storages] == [(), (3,), (), ()]


@pytest.mark.parametrize("saved", [False, True])
def test_a_key_belongs_to_a_noted_storage_even_if_it_dies(saved: bool) -> None:
    """Check that no new storage at the same address is taken for a recorded storage."""
    found, dying = Pass().save(), torch.zeros(8).untyped_storage()
    key, pins = dying._cdata, [StoragePin.of(dying)]
    if saved:
        found.save(storage=dying).storages.pop()
    else:
        unsaved = SimpleNamespace(key=key, is_saved=False, num_bytes=32, num_writes=0, pin=pins.pop, guard=None)
        found.computable(0, unsaved)
    pins.clear()
    del dying
    assert all(torch.zeros(8).untyped_storage()._cdata != key for _ in range(100))


def test_recomputing_takes_the_time_of_all_its_operations() -> None:
    steps = [SimpleNamespace(record=SimpleNamespace(marks=marks)) for marks in ((1.0, 1.5), (2.0, 4.0))]
    found = Pass().save().computable(0, steps=steps, modules={None}).use(0).end_backward().recorder.finish()
    assert found.profile.storages[0].recompute_s == 2.5
    assert found.makers == {0: {None}}
    assert found.operations == {0: ("sin",)}


def test_what_backward_never_used_is_not_recomputed() -> None:
    found = Pass().save()
    found.computable(0, source(found.storages[0], live=True)).end_backward()
    assert (found.profile().storages[0].recompute_s, found.profile().storages[0].sources) == (None, ())


@pytest.mark.parametrize("changes_before_its_end", [False, True])
def test_operands_are_watched_until_the_backward_that_needs_them_is_over(changes_before_its_end: bool) -> None:
    changed = [1] if changes_before_its_end else []
    found = Pass().save().computable(0, checks=[lambda: False, lambda: bool(changed)]).use(0).end_backward()
    changed.append(1)
    found.end_backward()
    assert (found.profile().storages[0].recompute_s is None) == changes_before_its_end


def test_operands_of_what_a_later_backward_needs_are_watched_until_then() -> None:
    changed: list[int] = []
    found = Pass().save().save().computable(0, checks=[lambda: bool(changed)]).use(1).end_backward()
    changed.append(1)
    assert found.use(0).end_backward().profile().storages[0].recompute_s is None


# ------------------------------------------------------------------------------------------------ room


def test_stretches_between_the_offloaders_work_are_measured_also_where_it_fails() -> None:
    seen: list[Any] = []
    room = SimpleNamespace(
        begin=lambda: seen.append("begin"),
        sample=lambda held: seen.append(held),
        restart=lambda: seen.append("restart"),
        end=lambda held: seen.append(("end", held)),
    )
    found = Pass(room=room)
    found.held.now_bytes = 5
    found.save()
    found.held.now_bytes = 7
    with pytest.raises(ZeroDivisionError), found.recorder.working():
        raise ZeroDivisionError
    found.end_backward()
    assert seen == ["begin", 5, "restart", 7, "restart", ("end", 7)]


# ------------------------------------------------------------------------------------------------ other passes

STORAGES = (
    SavedStorage(100, 1.0, (6.0, 8.0), recompute_s=0.5, sources=(1,)),
    SavedStorage(300, 0.5, (7.0,), freed_s=9.0, can_offload=False),
    SavedStorage(50, 1.0, ()),
)
RECORDING = RecordedPass(Profile(STORAGES, 10.0, (6.5,)), (100, 300), ("a", "b"), {0: {None}})


def test_a_pass_that_takes_longer_does_everything_later() -> None:
    found = scaled(RECORDING, 2.0)
    first, second, third = found.profile.storages
    assert first == replace(STORAGES[0], saved_at_s=2.0, uses_s=(12.0, 16.0), recompute_s=1.0)
    assert second == replace(STORAGES[1], saved_at_s=1.0, uses_s=(14.0,), freed_s=18.0)
    assert third == replace(STORAGES[2], saved_at_s=2.0)
    assert (found.profile.step_s, found.profile.backward_ends_s) == (20.0, (13.0,))
    assert replace(found, profile=RECORDING.profile) == RECORDING


def test_a_pass_grows_to_the_largest_size_of_each_storage() -> None:
    found = grown(RECORDING, [500, 100])
    assert found.sizes == (500, 300)
    assert [storage.num_bytes for storage in found.profile.storages] == [500, 300, 100]  # the last in proportion
    assert found.profile.step_s == 20.0
    assert grown(found, [1, 1]) == found


def test_a_pass_with_another_number_of_storages_is_no_larger_pass() -> None:
    grow: Callable[[], RecordedPass] = lambda: grown(RECORDING, [100])  # noqa: E731
    with pytest.raises(ValueError, match="zip"):
        grow()
