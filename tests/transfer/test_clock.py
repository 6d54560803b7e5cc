"""Tests of the clock of streams, whose marks on several compute streams may come in any order."""

import pytest
import torch

from hf_memopt.activations.pass_recorder import PassRecorder
from hf_memopt.activations.saved_tensors.device_state import DeviceBytes
from hf_memopt.transfer.clock import StreamClock


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
