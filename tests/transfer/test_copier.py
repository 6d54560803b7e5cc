"""Tests of the copiers' counts, and of the order of the stream copier's operations."""

import os
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from torch import Tensor

from hf_memopt.transfer import Copier, StreamCopier, SyncCopier


def test_sync_copier_copies_and_counts() -> None:
    copier = SyncCopier()
    host, device = copier.empty_host(8), copier.empty_device(8)
    host.copy_(torch.arange(8))
    copier.to_device(host, device).wait()
    copier.to_host(device[:4], host[4:]).wait()
    assert host.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert (copier.bytes_to_device, copier.bytes_to_host) == (8, 4)
    assert copier.stall_ms() > 0


@pytest.mark.parametrize("copier", [SyncCopier(), AdversarialCopier()])
def test_copiers_fulfil_the_protocol(copier: Any) -> None:
    assert isinstance(copier, Copier)


@pytest.mark.parametrize("schedule", ["early", "late", "random"])
def test_adversarial_copier_delivers_after_wait(schedule: str) -> None:
    copier = AdversarialCopier(schedule)
    source, destination = torch.arange(16, dtype=torch.uint8), copier.empty_device(16)
    transfer = copier.to_device(source, destination)
    if schedule == "late":
        assert (destination == 0xFF).all()
    transfer.wait()
    assert torch.equal(source, destination)
    copier.release(destination)
    assert (destination == 0xFF).all()


def test_adversarial_copier_catches_release_under_a_copy() -> None:
    copier = AdversarialCopier("late")
    buffer = copier.empty_device(4)
    source = torch.zeros(4, dtype=torch.uint8)
    transfer = copier.to_device(source, buffer)
    with pytest.raises(AssertionError, match="released under a copy"):
        copier.release(buffer)
    del source
    with pytest.raises(AssertionError, match="freed under a copy"):
        transfer.wait()


class FakeEvent:
    def __init__(self, device: Any = None, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self.finished = False
        self.num_queries = 0

    def query(self) -> bool:
        self.num_queries += 1
        return self.finished

    def synchronize(self) -> None:
        self.finished = True

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert self.enable_timing
        assert other.enable_timing
        return 2.5


class FakeStream:
    """A stream that logs its calls, while the CPU performs the copies inside `with stream`."""

    log: list[tuple[str, "FakeStream", Any]]

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def __ne__(self, other: object) -> bool:  # as torch's, which differs from None no more than it equals None
        return other is not None and self is not other

    def wait_stream(self, other: "FakeStream") -> None:
        self.log.append(("wait_stream", self, other))

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(("wait_event", self, event))

    def record_event(self, event: FakeEvent) -> FakeEvent:
        self.log.append(("record_event", self, event))
        return event

    def synchronize(self) -> None:
        self.log.append(("synchronize", self, None))

    def __enter__(self) -> "FakeStream":
        self.log.append(("enter", self, None))
        return self

    def __exit__(self, *error: Any) -> None:
        self.log.append(("exit", self, None))


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    stream = FakeStream()
    monkeypatch.setattr(FakeStream, "log", [], raising=False)
    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    return stream


def test_stream_copier_orders_copy_after_compute_and_compute_after_copy(compute: FakeStream) -> None:
    copier = StreamCopier("cpu")
    source, destination = torch.arange(4), torch.zeros(4, dtype=torch.long)
    transfer = copier.to_device(source, destination)
    before_wait = [(name, stream is compute) for name, stream, _ in FakeStream.log]
    assert before_wait == [("wait_stream", False), ("enter", False), ("record_event", False), ("exit", False)]
    side, finished = FakeStream.log[0][1], FakeStream.log[2][2]
    assert FakeStream.log[0][2] is compute
    transfer.wait()
    waited = [(name, stream is compute, what is finished) for name, stream, what in FakeStream.log[4:]]
    assert waited == [("record_event", True, False), ("wait_event", True, True), ("record_event", True, False)]
    assert torch.equal(source, destination)
    assert side is not compute


def test_stream_copier_waits_once_and_uses_one_stream_per_direction(compute: FakeStream) -> None:
    copier = StreamCopier("cpu")
    tensor = torch.zeros(4)
    up, down = copier.to_device(tensor, tensor.clone()), copier.to_host(tensor, tensor.clone())
    streams = [stream for name, stream, _ in FakeStream.log if name == "enter"]
    assert streams[0] is not streams[1]
    for _ in range(2):
        up.wait()
        down.wait()
    assert sum(name == "wait_event" for name, *_ in FakeStream.log) == 2
    assert (copier.bytes_to_device, copier.bytes_to_host) == (16, 16)


def events_of(side: FakeStream) -> list[FakeEvent]:
    """Return the events at the ends of the copies on a stream."""
    return [event for name, stream, event in FakeStream.log if name == "record_event" and stream is side]


def copy_again(copier: StreamCopier) -> None:
    copier.to_host(torch.zeros(4), torch.zeros(4))


@pytest.mark.parametrize("look", [StreamCopier.stall_ms, copy_again])
def test_stream_copier_keeps_host_memory_until_the_copy_is_over(
    compute: FakeStream, look: Callable[[StreamCopier], object]
) -> None:
    copier = StreamCopier("cpu", pin_memory=False)
    block = copier.empty_host(4)
    memory = weakref.ref(block)
    copier.to_device(block, copier.empty_device(4)).wait()
    del block
    look(copier)
    assert memory() is not None
    events_of(copier._stream_to_device)[0].finished = True
    look(copier)
    assert memory() is None


def test_dropped_host_memory_is_given_back_before_more_is_taken(compute: FakeStream) -> None:
    copier = StreamCopier("cpu", pin_memory=False)
    block = copier.empty_host(4)
    memory = weakref.ref(block)
    copier.to_device(block, copier.empty_device(4)).wait()
    del block
    copier.empty_host(4)
    assert memory() is None
    assert events_of(copier._stream_to_device)[0].finished


def test_whoever_drops_a_stream_copier_waits_for_its_copies(compute: FakeStream) -> None:
    copier = StreamCopier("cpu", pin_memory=False)
    host, device = copier.empty_host(4), copier.empty_device(4)
    copier.to_device(host, device).wait()
    copier.to_host(device, host).wait()
    ends = events_of(copier._stream_to_device) + events_of(copier._stream_to_host)
    assert not any(event.finished for event in ends)
    del copier
    assert all(event.finished for event in ends)


def test_a_copy_that_cannot_be_waited_for_is_over_when_that_is_raised(
    compute: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = StreamCopier("cpu", pin_memory=False)
    transfer = copier.to_device(copier.empty_host(4), copier.empty_device(4))

    def refuse(stream: FakeStream, event: FakeEvent) -> None:
        raise RuntimeError("no more events")

    monkeypatch.setattr(FakeStream, "wait_event", refuse)
    with pytest.raises(RuntimeError, match="no more events"):
        transfer.wait()
    assert all(event.finished for event in events_of(copier._stream_to_device))


def test_a_copy_whose_end_cannot_be_noted_is_waited_for(compute: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    copier = StreamCopier("cpu", pin_memory=False)

    def refuse(stream: FakeStream, event: FakeEvent) -> FakeEvent:
        raise RuntimeError("no more events")

    monkeypatch.setattr(FakeStream, "record_event", refuse)
    with pytest.raises(RuntimeError, match="no more events"):
        copier.to_device(copier.empty_host(4), copier.empty_device(4))
    assert ("synchronize", copier._stream_to_device, None) in FakeStream.log


def test_a_forked_process_does_not_wait(compute: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    copier = StreamCopier("cpu", pin_memory=False)
    host = copier.empty_host(4)
    copier.to_device(host, copier.empty_device(4)).wait()
    (end,) = events_of(copier._stream_to_device)
    monkeypatch.setattr(os, "getpid", lambda: 0)
    del copier
    assert not end.finished


def test_a_second_compute_stream_is_ordered_too(compute: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    copier = StreamCopier("cpu", pin_memory=False)
    host, device = copier.empty_host(4), RecordedMemory(4)
    transfer = copier.to_device(host, device)
    (end,) = events_of(copier._stream_to_device)
    transfer.wait()
    second = FakeStream()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: second)
    for _ in range(2):
        transfer.wait()
    assert [stream for name, stream, event in FakeStream.log if name == "wait_event" and event is end] == [
        compute,
        second,
    ]
    assert device.recorded == [second]


def test_memory_is_ordered_for_the_stream_that_owns_it(compute: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    copier = StreamCopier("cpu", pin_memory=False)
    transfer = copier.to_host(copier.empty_device(4), copier.empty_host(4))
    (end,) = events_of(copier._stream_to_host)
    second = FakeStream()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: second)
    transfer.wait()
    ordered = [stream for name, stream, event in FakeStream.log if name == "wait_event" and event is end]
    assert ordered == [second, compute]


def test_copies_for_another_compute_stream_wait_for_those_before(
    compute: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = StreamCopier("cpu", pin_memory=False)
    host, device = copier.empty_host(4), copier.empty_device(4)
    copier.to_device(host, device).wait()
    second = FakeStream()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: second)
    FakeStream.log.clear()
    copier.to_host(device, host)
    assert ("wait_stream", copier._stream_to_host, copier._stream_to_device) in FakeStream.log
    FakeStream.log.clear()
    copier.to_host(device, host)
    waits = [(stream, other) for name, stream, other in FakeStream.log if name == "wait_stream"]
    assert waits == [(copier._stream_to_host, second)]


class RecordedMemory(Tensor):
    recorded: list[FakeStream]

    def __new__(cls, num_bytes: int) -> "RecordedMemory":
        memory = torch.zeros(num_bytes, dtype=torch.uint8).as_subclass(cls)
        memory.recorded = []
        return memory

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)


def test_stalls_are_asked_for_once_each(compute: FakeStream) -> None:
    copier = StreamCopier("cpu", pin_memory=False)
    host, device = copier.empty_host(4), copier.empty_device(4)
    for _ in range(300):
        copier.to_device(host, device).wait()
    events = {event for name, _, event in FakeStream.log if name == "record_event"}
    # Each wait and each copy queries the oldest event under way, while the device makes no progress.
    assert sum(event.num_queries for event in events) <= 3 * 300 + 2
    for event in events:
        event.finished = True
    assert copier.stall_ms() == 300 * 2.5


def test_stream_copier_adds_up_stalls_that_are_over(compute: FakeStream) -> None:
    copier = StreamCopier("cpu")
    tensor = torch.zeros(4)
    copier.to_device(tensor, tensor.clone()).wait()
    assert copier.stall_ms() == 0
    FakeStream.log[-1][2].finished = True
    assert copier.stall_ms() == 2.5
    assert copier.stall_ms() == 2.5


def test_the_adversarial_copier_finds_a_source_that_is_freed_before_its_copy_is_seen_to_be_over() -> None:
    for schedule, is_seen in (("early", True), ("late", False)):
        copier = AdversarialCopier(schedule)
        source = torch.zeros(8, dtype=torch.uint8)
        transfer = copier.to_device(source, torch.ones(8, dtype=torch.uint8))
        assert transfer.finished.query() is is_seen
        del source
        with nullcontext() if is_seen else pytest.raises(AssertionError, match="freed under a copy"):
            transfer.wait()
