import pytest
import torch
from counted_allocator import FakeCounters
from late_imports import LateModule

step_memory = LateModule("hf_memopt.lerobot.reflow.reflow_policy")


def test_marks_keep_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = step_memory.PhaseMemory("cpu")
    on_cpu.mark("forward")
    assert 0 < on_cpu.figures()["memory/forward_host_rss_gib"] < 1000
    assert not on_cpu.has_counters

    counters = FakeCounters()
    monkeypatch.setattr("hf_memopt.lerobot.reflow.reflow_policy.counters_for", lambda device: counters)
    memory = step_memory.PhaseMemory("cuda")
    counters.move(3 * 2**28)
    memory.mark("teacher")
    counters.move(-(2**28))
    memory.mark("forward")
    assert memory.figures() == {"memory/teacher_peak_gib": 0.75, "memory/forward_peak_gib": 0.75}
    assert memory.has_counters
    assert counters.num_resets == 0


def test_the_end_of_backward_is_noted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = FakeCounters()
    monkeypatch.setattr("hf_memopt.lerobot.reflow.reflow_policy.counters_for", lambda device: counters)
    memory = step_memory.PhaseMemory("cuda")
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda grad: counters.move(2**30))  # the last node of the graph
    for peak_gib in (1.0, 2.0):
        loss = (weight * 3).sum()
        memory.mark_after_backward(loss)
        before = memory.figures()
        loss.backward()
        assert torch.equal(loss, torch.tensor(6.0))
        assert memory.figures() == {**before, "memory/backward_peak_gib": peak_gib}
    assert torch.equal(weight.grad, torch.full((2,), 6.0))
    memory.mark_after_backward(loss.detach())  # an evaluation
