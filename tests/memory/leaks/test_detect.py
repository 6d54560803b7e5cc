"""The holder of every planted leak, and no report of a sound loop."""

import gc
from collections.abc import Callable, Iterator

import pytest
from leaky_steps import ACTIVATION_BYTES, LEAKS, SOUND, Step, cache_by_length, growing_outputs, plain, sorted_lengths

from hf_memopt.memory.leaks.detect import LeakMonitor, LeakReport, MemoryLeakError, StorageAges, detect_leaks
from hf_memopt.memory.leaks.live_storages import live_storages


@pytest.fixture(params=[True, False], ids=["gc", "no_gc"])
def _garbage_collection(request: pytest.FixtureRequest) -> Iterator[None]:
    gc.collect()
    if not request.param:
        gc.disable()
    yield
    gc.enable()
    # No collector breaks the planted cycle of parameter and gradient, which goes through C++.
    for entry in [entry for entries in live_storages().values() for entry in entries if entry.kind == "gradient"]:
        entry.root.grad = None


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")  # the leak itself
@pytest.mark.usefixtures("_garbage_collection")
@pytest.mark.parametrize("name", LEAKS)
@pytest.mark.sweep(share=0.25)
def test_a_leak_is_found_and_put_down_to_its_holder(name: str) -> None:
    make, kind, shape, holder = LEAKS[name]
    if name == "cycle" and gc.isenabled():
        pytest.skip("the collector frees it, at a time of its own choosing")
    report = detect_leaks(make())
    assert report.leaking
    matching = [culprit for culprit in report.culprits if (culprit.kind, culprit.shape) == (kind, shape)]
    assert matching, str(report)
    assert holder in matching[0].held_by
    assert matching[0].count >= 35
    assert matching[0].held_by in str(report)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")  # sound if zeroed
@pytest.mark.usefixtures("_garbage_collection")
@pytest.mark.parametrize("make", SOUND)
def test_a_sound_loop_is_not_complained_of(make: Callable[[], Step]) -> None:
    report = detect_leaks(make())
    assert not report.leaking, str(report)
    assert report.culprits == ()
    assert "No memory leak" in str(report)
    assert "Not seen on the CPU" in str(report)


def run(step: Step, monitor: LeakMonitor, num_steps: int = 60) -> list[LeakReport]:
    reports = []
    for _ in range(num_steps):
        step()
        reports.append(monitor.step())
    return [report for report in reports if report is not None]


@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_monitor_reports_once(every_n_steps: int, caplog: pytest.LogCaptureFixture) -> None:
    step, monitor = growing_outputs(), LeakMonitor(every_n_steps)
    assert run(step, monitor, num_steps=60 * every_n_steps) == [monitor.report()]
    assert [record.getMessage() for record in caplog.records] == [str(monitor.report())]
    assert monitor.report().bytes_per_step == ACTIVATION_BYTES
    assert monitor.report().last_step <= 60 * every_n_steps


def test_monitor_raises() -> None:
    step, monitor = growing_outputs(), LeakMonitor(1, action="raise")
    with pytest.raises(MemoryLeakError, match=r"outputs\[") as caught:
        run(step, monitor)
    assert caught.value.report is monitor.report()


def test_monitor_finds_a_leak_that_starts_late() -> None:
    sound, leak, monitor = plain(), growing_outputs(), LeakMonitor(1)
    assert run(sound, monitor) == []
    assert len(run(leak, monitor)) == 1


@pytest.mark.parametrize("make", [plain, sorted_lengths, cache_by_length])
def test_monitor_stays_quiet(make: Callable[[], Step]) -> None:
    run(make(), LeakMonitor(1, action="raise"), num_steps=100)


def test_monitor_spends_one_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look once a second, with steps of 50 ms and looks of 10 ms."""
    now, looks = [0.0], []

    def look(self: StorageAges, step: int) -> None:
        looks.append(step)
        now[0] += 0.010

    monkeypatch.setattr("hf_memopt.memory.leaks.detect.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(StorageAges, "sample", look)
    monitor = LeakMonitor()
    for _ in range(200):
        now[0] += 0.050
        monitor.step()
    assert looks == [1, 21, 41, 61, 81, 101, 121, 141, 161, 181]


def test_monitor_refuses_an_unknown_action() -> None:
    with pytest.raises(ValueError, match="action='stop' is unknown; use 'warn' or 'raise'"):
        LeakMonitor(action="stop")


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="num_steps=10 must be at least 24, to tell a leak from a start"):
        detect_leaks(plain(), num_steps=10)
