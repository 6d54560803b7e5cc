"""A comparison of MemoryTracker and the out-of-memory report with torch's own counters on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from host_waits import host_never_waits
from torch import Tensor, nn

from hf_memopt.memory import MemoryTracker, explain_oom
from hf_memopt.memory.device_counters import AcceleratorCounters

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 2**20


class Mlp(nn.Module):
    def __init__(self, dim: int = 512) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


@pytest.fixture
def step() -> Any:
    """Phases of a step by name, after a warm-up."""
    torch.manual_seed(0)
    model, x = Mlp().cuda(), torch.randn(256, 512, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    held: dict[str, Tensor] = {}
    phases = {
        "forward": lambda: held.update(loss=model(x)),
        "backward": lambda: held.pop("loss").backward(),
        "optimizer": optimizer.step,
        "zero_grad": optimizer.zero_grad,
    }
    for phase in phases.values():
        phase()
    return phases


def peaks_by_torch(phases: dict[str, Any]) -> dict[str, int]:
    """Reset torch's counter before each phase."""
    peaks = {}
    for name, phase in phases.items():
        torch.cuda.reset_peak_memory_stats()
        phase()
        peaks[name] = torch.cuda.max_memory_allocated()
    return peaks


def test_peaks_equal_torchs_own_to_the_byte(step: Any) -> None:
    expected = peaks_by_torch(step)
    tracker = MemoryTracker("cuda", reset_peaks=True)
    for name, phase in step.items():
        with tracker.phase(name):
            phase()
    tracker.step()
    assert {name: peak.at_most_bytes for name, peak in tracker.peaks.items()} == expected
    assert all(peak.exact for peak in tracker.peaks.values())


def test_a_shared_counter_is_not_disturbed_and_bounds_the_peaks(step: Any) -> None:
    expected = peaks_by_torch(step)
    torch.cuda.reset_peak_memory_stats()
    tracker = MemoryTracker("cuda")
    for name, phase in step.items():
        with tracker.phase(name):
            phase()
    tracker.step()
    assert torch.cuda.max_memory_allocated() == max(expected.values()) == tracker.highest_bytes
    for name, peak in tracker.peaks.items():
        assert peak.at_least_bytes <= expected[name] <= peak.at_most_bytes
    assert tracker.peaks[tracker.peak_phase or ""].exact


def test_counters_equal_those_of_the_public_interface() -> None:
    block = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    memory = AcceleratorCounters(torch.device("cuda")).read()
    stats = torch.accelerator.memory_stats()
    assert memory.allocated_bytes == stats["allocated_bytes.all.current"] >= block.nbytes
    assert memory.peak_allocated_bytes == torch.cuda.max_memory_allocated()
    assert memory.reserved_bytes == torch.cuda.memory_reserved()
    assert memory.inactive_split_bytes == stats["inactive_split_bytes.all.current"]
    assert memory.num_alloc_retries == stats["num_alloc_retries"]


def test_the_host_never_waits(step: Any) -> None:
    tracker = MemoryTracker("cuda", reset_peaks=True)
    with host_never_waits():
        for name, phase in step.items():
            with tracker.phase(name):
                phase()
        tracker.step()
        tracker.read()


def test_a_phase_does_not_wait_for_queued_work() -> None:
    tracker = MemoryTracker("cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    marker = torch.cuda.Event()
    marker.record()
    with tracker.phase("forward"):
        pass
    tracker.step()
    tracker.read()
    assert not marker.query()
    torch.cuda.synchronize()


def test_a_reading_knows_the_device_as_a_whole() -> None:
    _ = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    device = MemoryTracker("cuda").read().device
    assert device is not None
    assert device.total_bytes == torch.cuda.mem_get_info()[1]
    # This process's CUDA context, at least.
    assert 0 < device.elsewhere_bytes < device.total_bytes


def test_a_real_error_is_explained_without_taking_memory(tmp_path: Path) -> None:
    model, x = Mlp().cuda(), torch.randn(256, 512, device="cuda")
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python")
    try:
        loss = model(x)
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        with pytest.raises(torch.OutOfMemoryError) as caught, explain_oom(model, output_dir=tmp_path):
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    (report,) = caught.value.__notes__
    assert "the forward phase" in report
    assert "saved activation: after up (Relu)" in report or "saved activation: down (Addmm)" in report
    assert f"({4 * 512}, 512) float32, parameter: up.weight" in report
    assert "in tensors" in report
    assert (tmp_path / "out_of_memory_rank0.pickle").stat().st_size > 0
    assert loss.requires_grad
