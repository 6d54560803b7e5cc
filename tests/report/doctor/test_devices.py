from types import SimpleNamespace

import pytest
import torch
from counted_allocator import FakeCounters

from hf_memopt.report.doctor import devices
from hf_memopt.report.doctor.devices import examine_device, find_devices
from hf_memopt.transfer import Copier, SyncCopier
from hf_memopt.transfer.clock import HostClock
from hf_memopt.units import GIB


@pytest.mark.parametrize("can_pin", [True, False])
def test_an_accelerator_is_measured(monkeypatch: pytest.MonkeyPatch, can_pin: bool) -> None:
    """With stand-ins for whatever a CPU lacks."""
    copiers: list[Copier] = []

    def make_copier(device: torch.device, pin_memory: bool) -> Copier:
        copiers.append(SyncCopier())
        return copiers[-1]

    def make_pinned(num_bytes: int, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(is_pinned=lambda: can_pin)

    monkeypatch.setattr(devices, "copier_for", make_copier)
    monkeypatch.setattr(devices, "clock_for", lambda device: HostClock())
    monkeypatch.setattr(devices, "pinned_empty", make_pinned)
    monkeypatch.setattr(devices, "counters_for", lambda device: FakeCounters())
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (3 * GIB, 4 * GIB))
    found = examine_device(torch.device("hpu:0"))
    assert (found.free_gib, found.total_gib, found.can_pin, found.has_counters) == (3, 4, can_pin, True)
    # What could not be pinned is not measured as if it were.
    assert (found.pinned is not None) == can_pin
    assert found.pageable is not None
    assert len(copiers) == 1 + can_pin
    assert all(copier.bytes_to_host == copier.bytes_to_device == 6 * 16 * 2**20 for copier in copiers)


@pytest.mark.parametrize("name", ["nonsense", "cpu:7", "vulkan"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"device='{name}' is no"):
        find_devices(name)
