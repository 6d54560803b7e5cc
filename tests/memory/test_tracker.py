"""MemoryTracker with a counted allocator, with scripted counters and on the CPU."""

import logging
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from counted_allocator import CountedAllocator, FakeCounters
from hypothesis import given, settings
from torch import Tensor, nn

from hf_memopt.memory import MemoryTracker, PhasePeak
from hf_memopt.memory.logger import phase_table
from hf_memopt.units import KIB


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).sum()


class Phases:
    """Run a tracker's phases, and keep the most bytes that the allocator counted in each."""

    def __init__(self, tracker: MemoryTracker, counters: FakeCounters) -> None:
        self.tracker = tracker
        self.seen: dict[str, int] = {}
        self._timeline = counters.timeline

    def run(self, name: str, action: Callable[[], Any]) -> Any:
        start = len(self._timeline)
        with self.tracker.phase(name):
            result = action()
        # The last entry before the phase has the bytes allocated at its start.
        self.seen[name] = max(self.seen.get(name, 0), *self._timeline[start - 1 :])
        return result


def train(phases: Phases, allocator: CountedAllocator, num_steps: int = 3) -> None:
    """Charge a toy MLP to the allocator, in steps of two micro-batches and an evaluation."""
    torch.manual_seed(0)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(4, 8)
    allocator.charge([*model.parameters(), x])
    for _ in range(num_steps):
        for _ in range(2):
            loss = phases.run("forward", lambda: model(x))
            phases.run("backward", loss.backward)
        phases.run("optimizer", optimizer.step)
        optimizer.zero_grad()
        with torch.no_grad():
            phases.run("evaluation", lambda: model(x))
        phases.tracker.step()


def test_peaks_are_exact_to_the_byte_where_the_counter_may_be_reset() -> None:
    with CountedAllocator() as allocator:
        phases = Phases(MemoryTracker(counters=allocator, reset_peaks=True), allocator)
        train(phases, allocator)
    peaks = phases.tracker.peaks
    assert all(peak.exact for peak in peaks.values())
    assert {name: peak.at_most_bytes for name, peak in peaks.items()} == phases.seen
    assert len(set(phases.seen.values())) == 4
    assert phases.tracker.highest_bytes == max(allocator.timeline)
    assert phases.seen[phases.tracker.peak_phase or ""] == max(phases.seen.values())


def test_forward_peak_of_an_mlp_in_closed_form() -> None:
    with CountedAllocator() as allocator:
        tracker = MemoryTracker(counters=allocator, reset_peaks=True)
        model, x = Mlp(), torch.randn(4, 8)
        allocator.charge([*model.parameters(), x])
        with tracker.phase("forward"):
            loss = model(x)
    weights, inputs, hidden = (8 * 16 + 16 * 2) * 4, 4 * 8 * 4, 4 * 16 * 4
    # The hidden layer counts before and after the activation function; the 8 results and their sum come later.
    assert tracker.peaks["forward"].at_most_bytes == weights + inputs + 2 * hidden
    assert tracker.read().device.counters.allocated_bytes == weights + inputs + hidden + loss.nbytes


def test_a_shared_counter_is_left_alone_and_bounds_the_peaks() -> None:
    with CountedAllocator() as allocator:
        phases = Phases(MemoryTracker(counters=allocator), allocator)
        train(phases, allocator)
    tracker = phases.tracker
    assert allocator.num_resets == 0
    assert allocator.peak_bytes == tracker.highest_bytes == max(allocator.timeline)
    for name, peak in tracker.peaks.items():
        assert peak.at_least_bytes <= phases.seen[name] <= peak.at_most_bytes
    assert tracker.peaks[tracker.peak_phase or ""].exact
    assert phases.seen[tracker.peak_phase or ""] == max(allocator.timeline)


@pytest.mark.parametrize("moves", [(60, -50), (10, 50), (10, 50, -20)])
def test_below_an_old_peak_the_ends_of_a_phase_are_its_lower_bound(moves: tuple[int, ...]) -> None:
    counters = FakeCounters()
    counters.move(100)
    counters.move(moves[0] - 100)
    tracker = MemoryTracker(counters=counters)
    with tracker.phase("forward"):
        for move in moves[1:]:
            counters.move(move)
    peak = tracker.peaks["forward"]
    assert (peak.at_least_bytes, peak.at_most_bytes) == (max(moves[0], counters.allocated_bytes), 100)
    assert not peak.exact


def test_a_reset_by_someone_else_within_a_phase_leaves_its_beginning_known() -> None:
    counters = FakeCounters()
    counters.move(100)
    counters.move(-40)
    tracker = MemoryTracker(counters=counters)
    with tracker.phase("forward"):
        counters.move(-50)
        counters.reset_peaks()
    assert (tracker.peaks["forward"].at_least_bytes, tracker.peaks["forward"].at_most_bytes) == (60, 100)


STEPS = st.one_of(
    st.tuples(st.just("move"), st.integers(-50, 100)),
    st.tuples(st.sampled_from(["a", "b", "c"]), st.none()),
    st.tuples(st.sampled_from(["end", "step", "reset"]), st.none()),
)


@settings(max_examples=150, deadline=None)
@given(script=st.lists(STEPS, max_size=40), reset_peaks=st.booleans())
def test_bounds_hold_for_every_course_of_memory(script: list[tuple[str, int | None]], reset_peaks: bool) -> None:
    counters = FakeCounters()
    tracker = MemoryTracker(counters=counters, reset_peaks=reset_peaks)
    true_peaks: dict[str, int] = {}
    phase, reset_within = None, False
    for action, num_bytes in script:
        if action == "move":
            counters.move(max(num_bytes, -counters.allocated_bytes))
        elif action == "reset":  # by other code
            counters.reset_peaks()
            reset_within = reset_within or phase is not None
        elif action == "step":
            tracker.step()
            phase = None
        else:
            phase = None if action == "end" else action
            tracker.switch_to(phase)
        if phase is not None:
            true_peaks[phase] = max(true_peaks.get(phase, 0), counters.allocated_bytes)
    tracker.step()
    for name, peak in tracker.peaks.items():
        assert peak.at_least_bytes <= true_peaks[name]
        if not reset_within:
            assert true_peaks[name] <= peak.at_most_bytes
            assert peak.exact or not reset_peaks


def test_nested_phases_include_each_other() -> None:
    counters = FakeCounters()
    tracker = MemoryTracker(counters=counters, reset_peaks=True)
    with tracker.phase("forward"):
        counters.move(10)
        with tracker.phase("teacher"):
            counters.move(90)
            counters.move(-90)
        counters.move(30)
    assert {name: peak.at_most_bytes for name, peak in tracker.peaks.items()} == {"forward": 100, "teacher": 100}
    with tracker.phase("forward"), tracker.phase("forward"):
        counters.move(100)
    assert tracker.peaks["forward"].at_most_bytes == 140


def test_a_phase_ends_with_an_exception() -> None:
    counters = FakeCounters()
    tracker = MemoryTracker(counters=counters, reset_peaks=True)
    counters.move(10)
    with pytest.raises(ZeroDivisionError), tracker.phase("forward"):
        _ = 1 / 0
    counters.move(90)
    tracker.step()
    assert tracker.peaks["forward"].at_most_bytes == 10


def test_a_step_ends_its_phases_and_returns_their_peaks() -> None:
    counters = FakeCounters()
    tracker = MemoryTracker(counters=counters, reset_peaks=True)
    with tracker.phase("forward"):
        counters.move(10)
        first = tracker.step()
        counters.move(20)
    second = tracker.step()
    assert first["forward"].at_most_bytes == 10
    assert second == {}
    assert (tracker.num_steps, list(tracker.peaks)) == (2, ["forward"])


def test_what_a_phase_reports_beside_its_peak() -> None:
    counters = FakeCounters()
    tracker = MemoryTracker(counters=counters)
    for _ in range(2):
        with tracker.phase("forward"):
            counters.move(100)
            counters.move(-40)
            counters.inactive_split_bytes = 7
            counters.num_alloc_retries += 3
        counters.num_alloc_retries += 1
        counters.inactive_split_bytes = 0
        counters.move(-60)
        tracker.step()
    peak = tracker.peaks["forward"]
    assert (peak.reserved_bytes, peak.inactive_split_bytes, peak.num_alloc_retries) == (100, 7, 6)
    assert peak.host_rss_bytes is None


def test_a_reading_knows_the_device_as_a_whole() -> None:
    counters = FakeCounters(total_bytes=1000)
    counters.elsewhere_bytes = 300
    tracker = MemoryTracker(counters=counters)
    counters.move(200)
    counters.move(-50)
    device = tracker.read().device
    assert (device.highest_bytes, device.elsewhere_bytes, device.room_bytes) == (200, 300, 700)
    assert device.fragmentation_bytes == 50


def test_phases_read_counters_once_and_ask_no_driver() -> None:
    counters = FakeCounters()
    tracker = MemoryTracker(counters=counters, reset_peaks=True)
    before = counters.num_reads
    for _ in range(10):
        for name in ("forward", "backward", "optimizer"):
            tracker.switch_to(name)
        tracker.step()
    assert counters.num_reads - before == 40
    assert counters.num_queries == 0


def test_the_cpu_has_host_memory_only_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hf_memopt"):
        tracker = MemoryTracker("cpu")
        block = None
        for _ in range(3):
            with tracker.phase("forward"):
                block = torch.ones(32 * KIB * KIB, dtype=torch.uint8)
            tracker.step()
    assert [record.getMessage() for record in caplog.records] == [
        "memory on cpu: torch keeps no counters there, so only the process's host memory is reported"
    ]
    peak = tracker.peaks["forward"]
    assert peak == PhasePeak(host_rss_bytes=peak.host_rss_bytes)
    assert peak.host_rss_bytes >= block.nbytes
    assert not peak.exact
    assert not tracker.has_counters
    assert tracker.highest_bytes == peak.host_rss_bytes
    reading = tracker.read(pss=True)
    assert reading.device is None
    assert 0 < reading.host.rss_bytes < reading.host.total_bytes
    assert reading.host.pss_bytes is None or 0 < reading.host.pss_bytes < 2 * reading.host.rss_bytes
    assert reading.host.pinned_bytes is None
    assert tracker.read().host.pss_bytes is None


def test_tables_for_people() -> None:
    counters = FakeCounters()
    tracker = MemoryTracker(counters=counters)
    with tracker.phase("forward"):
        counters.move(3 * KIB)
        counters.move(-2 * KIB)
    with tracker.phase("optimizer"):
        pass
    assert phase_table(tracker.peaks).splitlines() == [
        "phase      peak allocated        reserved  inactive splits  retries",
        "forward    3.00 KiB              3.00 KiB  0 B              0",
        "optimizer  1.00 KiB to 3.00 KiB  3.00 KiB  0 B              0",
    ]
    on_cpu = {"forward": PhasePeak(host_rss_bytes=5 * 2**29)}
    assert phase_table(on_cpu).splitlines() == ["phase    host memory", "forward  2.50 GiB"]
