import logging
from typing import Any

import pytest
import torch

from hf_memopt.memory import MemoryTracker
from hf_memopt.memory import device_counters as counters_module
from hf_memopt.memory.device_counters import AcceleratorCounters, Host
from hf_memopt.units import KIB


def test_host_memory_grows_with_what_is_allocated() -> None:
    host = Host()
    before = host.rss_bytes()
    block = torch.ones(64 * KIB * KIB, dtype=torch.uint8)
    assert host.rss_bytes() - before > 0.9 * block.nbytes


def test_a_device_without_counters_falls_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(self: AcceleratorCounters) -> None:
        raise RuntimeError("Allocator for mps is not a DeviceAllocator.")

    monkeypatch.setattr(counters_module.AcceleratorCounters, "read", missing)
    tracker = MemoryTracker("mps:0")
    assert tracker.read().device is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "mps:0: no allocator counters (Allocator for mps is not" in record.getMessage()


def test_accelerator_counters_read_torchs_books(monkeypatch: pytest.MonkeyPatch) -> None:
    def books(index: int) -> dict[str, Any]:
        assert index == 1
        kinds = {"allocated_bytes": (1, 2), "reserved_bytes": (3, 4), "inactive_split_bytes": (5, 6)}
        stats = {kind: {"all": {"current": now, "peak": peak}} for kind, (now, peak) in kinds.items()}
        return {**stats, "num_alloc_retries": 7, "num_ooms": 8}

    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", books)
    memory = AcceleratorCounters(torch.device("cuda", 1)).read()
    assert (memory.allocated_bytes, memory.peak_allocated_bytes, memory.reserved_bytes) == (1, 2, 3)
    assert (memory.inactive_split_bytes, memory.num_alloc_retries, memory.num_ooms) == (5, 7, 8)
