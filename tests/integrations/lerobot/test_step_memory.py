import pytest
from counted_allocator import FakeCounters
from late_imports import LateModule

step_memory = LateModule("hf_memopt.integrations.lerobot.step_memory")


def test_marks_keep_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = step_memory.PhaseMemory("cpu")
    on_cpu.mark("forward")
    assert 0 < on_cpu.figures()["forward_rss_gib"] < 1000

    counters = FakeCounters()
    monkeypatch.setattr("hf_memopt.integrations.lerobot.step_memory.counters_for", lambda device: counters)
    memory = step_memory.PhaseMemory("cuda")
    counters.move(3 * 2**28)
    memory.mark("teacher")
    counters.move(-(2**28))
    memory.mark("forward")
    assert memory.figures() == {"teacher_peak_gib": 0.75, "forward_peak_gib": 0.75}
    assert counters.num_resets == 0
