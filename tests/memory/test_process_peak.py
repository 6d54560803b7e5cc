"""The peak of a process on a CPU."""

from pathlib import Path

import pytest
import torch

from hf_memopt.memory import device_counters
from hf_memopt.memory.device_counters import peak_bytes, reset_peak

CPU = torch.device("cpu")
NUM_BYTES = 64 * 2**20


@pytest.fixture
def told() -> None:
    if peak_bytes(CPU) is None:
        pytest.skip("this system does not tell a process's peak")


def test_what_was_freed_counts_until_the_peak_is_reset(told: None) -> None:
    reset_peak(CPU)
    before = peak_bytes(CPU) or 0
    block = torch.ones(NUM_BYTES, dtype=torch.uint8)
    del block
    assert (peak_bytes(CPU) or 0) - before > 0.9 * NUM_BYTES
    reset_peak(CPU)
    assert (peak_bytes(CPU) or 0) - before < 0.5 * NUM_BYTES


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_counters, "_RESET", tmp_path / "clear_refs")
    reset_peak(CPU)
    assert peak_bytes(CPU) is None
    assert list(tmp_path.iterdir()) == []
