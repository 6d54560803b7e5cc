"""Tests of clocks: streams, whose marks may come in any order, a thread's own time, with and without waiting."""

import time
from types import SimpleNamespace

import pytest
import torch

from hf_memopt.activations.pass_recorder import PassRecorder
from hf_memopt.activations.saved_tensors.device_state import DeviceBytes
from hf_memopt.transfer.clock import Clock, HostClock, SecondsClock, StreamClock
from hf_memopt.transfer.memories_below import memories_below


class TimedEvent:
    """An event at the next of the given moments, in milliseconds."""

    moments: list[float]

    def __init__(self, device: object = None, enable_timing: bool = False) -> None:
        self.moment = 0.0
        self.is_over = False

    def synchronize(self) -> None:
        self.is_over = True

    def elapsed_time(self, other: "TimedEvent") -> float:
        assert self.is_over
        assert other.is_over
        return other.moment - self.moment


class Stream:
    def record_event(self, event: TimedEvent) -> TimedEvent:
        event.moment = TimedEvent.moments.pop(0)
        return event


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StreamClock:
    monkeypatch.setattr(torch, "Event", TimedEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream())
    return StreamClock("cuda")


def test_time_never_runs_backwards(clock: StreamClock) -> None:
    TimedEvent.moments = [5.0, 3.0]
    later, earlier = clock.mark(), clock.mark()
    assert clock.elapsed_s(later, earlier) == 0
    assert clock.elapsed_s(earlier, later) == pytest.approx(0.002)


def test_a_pass_on_several_streams_is_recorded(clock: StreamClock) -> None:
    # The pass begins on one stream, saves on a second that is far ahead, and is used on a third that is behind.
    TimedEvent.moments = [0.0, 7.0, 7.0, 2.0, 2.0, 9.0]
    recorder = PassRecorder(clock, None, DeviceBytes())
    storage = torch.zeros(4).untyped_storage()
    with recorder.working():
        recorder.saved(storage, 0, stays=False, num_writes=0)
    with recorder.using(0):
        pass
    recorder.end_backward(clock.mark())
    profile = recorder.finish().profile
    assert profile.storages[0].saved_at_s == pytest.approx(0.007)
    assert profile.storages[0].uses_s == pytest.approx((0.007,))
    assert profile.step_s == pytest.approx(0.014)


def sleeping_s(clock: Clock) -> float:
    """Return the time that a clock counts while the thread does nothing for 50 ms."""
    begun = clock.mark()
    time.sleep(0.05)
    end = clock.mark()
    assert clock.reached(end)
    return clock.elapsed_s(begun, end)


def test_only_a_clock_on_the_wall_counts_time_in_which_the_thread_does_nothing() -> None:
    assert sleeping_s(HostClock()) < 0.03
    assert sleeping_s(SecondsClock(time.perf_counter)) >= 0.05


def test_above_a_disk_waiting_is_counted_beside_the_time_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, file = [10.0], SimpleNamespace(waited_s=0.25, space=None)
    monkeypatch.setattr(time, "thread_time", lambda: computed[0])
    _, clock = memories_below(torch.device("cpu"), None, True, 0, file)
    begun = clock.mark()
    computed[0] += 2.0
    file.waited_s += 0.5
    end = clock.mark()
    assert (clock.elapsed_s(begun, end), clock.elapsed_s(end, begun)) == (2.5, 0.0)


@pytest.mark.parametrize("clock", [HostClock(), SecondsClock(lambda: 0.0)])
def test_a_backward_in_another_thread_takes_no_negative_time(clock: Clock) -> None:
    assert (clock.elapsed_s(2.0, 1.0), clock.elapsed_s(1.0, 1.5)) == (0.0, 0.5)
