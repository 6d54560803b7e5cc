"""Memory figures through an Accelerator, and a warning's text."""

from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from counted_allocator import FakeCounters
from tensorboard_runs import scalars

from hf_memopt.memory import MemoryLogger, MemoryTracker
from hf_memopt.memory.logger import high_memory_message, largest_of_ranks
from hf_memopt.units import GIB


@pytest.mark.parametrize(
    ("phase", "remedy"),
    [
        ("backward", "offload activations"),
        ("optimizer", "fused optimizer"),
        ("teacher", "OffloadedTeacher"),
        ("evaluation", "eval_accumulation_steps"),
        (None, "offload activations"),
    ],
)
def test_the_warning_fits_the_phase_of_the_peak(phase: str | None, remedy: str) -> None:
    counters = FakeCounters(total_bytes=100)
    tracker = MemoryTracker(counters=counters)
    tracker.switch_to(phase)
    counters.move(90)
    tracker.step()
    message = high_memory_message(tracker, tracker.read(), 0.85) or ""
    assert remedy in message
    assert (f"in the {phase} phase" in message) is (phase is not None)
    assert "expandable_segments" not in message
    counters.move(-30)
    assert "expandable_segments:True" in (high_memory_message(tracker, tracker.read(), 0.85) or "")


@pytest.fixture
def accelerator(tmp_path: Path) -> Accelerator:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    return accelerator


def test_an_accelerate_loop_logs_every_nth_step(
    accelerator: Accelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counters = FakeCounters(total_bytes=8 * GIB)
    memory = MemoryLogger(accelerator, log_every=2, reset_peaks=True, counters=counters)
    for step in range(5):
        with memory.phase("forward"):
            counters.move((step + 1) * GIB)
            counters.move(-(step + 1) * GIB)
        logged = memory.log(step)
        assert (logged is None) is (step % 2 == 1)
    accelerator.end_training()
    recorded = scalars(tmp_path / "run")
    assert recorded["memory/forward_peak_gib"] == [(0, 1.0), (2, 3.0), (4, 5.0)]
    assert recorded["memory/peak_allocated_gib"] == [(0, 1.0), (2, 3.0), (4, 5.0)]
    assert "high device memory" not in caplog.text
    counters.move(7 * GIB)
    memory.log(6)
    memory.log(8)
    assert caplog.text.count("high device memory") == 1


@pytest.mark.parametrize("options", [{"log_every": 0}, {"warn_at": 2.0}])
def test_the_accelerate_form_names_what_is_wrong(accelerator: Accelerator, options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value} must be"):
        MemoryLogger(accelerator, **options)


def test_alone_a_process_keeps_its_figures() -> None:
    metrics = {"memory/host_rss_gib": 1.0}
    assert largest_of_ranks(metrics) == metrics
