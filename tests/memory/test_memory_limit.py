"""Limits of a device's memory, and the peak below them."""

import sys
import time

import pytest
import torch

from hf_memopt.activations.plan_maker import room_on
from hf_memopt.memory import memory_limit
from hf_memopt.memory.device_counters import DeviceMemory
from hf_memopt.memory.memory_limit import LimitedMemory, lift_memory_limit, limit_memory, limited_memory
from hf_memopt.units import GIB, MIB

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from Linux' files")


class Books:
    """The counters of a device of 1,000 bytes, of which others have 100."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def take(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def read(self) -> DeviceMemory:
        return DeviceMemory(self.now, self.peak, self.now)

    def reset_peaks(self) -> None:
        self.peak = self.now

    def free_and_total(self) -> tuple[int, int]:
        return 900 - self.now, 1000


def test_a_peak_is_kept_where_others_reset_the_counter() -> None:
    books = Books()
    limited = LimitedMemory(books, 500)
    books.take(300)
    books.take(-200)
    limited.reset_peaks()
    books.take(50)
    assert limited.read().peak_allocated_bytes == 150
    assert limited.highest_bytes == limited.total_highest_bytes == 300
    limited.restart()
    assert limited.highest_bytes == 150
    assert limited.total_highest_bytes == 300
    assert limited.free_and_total() == (350, 500)


def test_the_memory_of_this_process_is_seen_even_if_it_is_held_for_a_moment() -> None:
    limited = limit_memory(CPU, None)
    try:
        before = limited.highest_bytes
        held = torch.ones(64 * MIB, dtype=torch.uint8)
        deadline = time.monotonic() + 5
        while limited.highest_bytes < before + 60 * MIB and time.monotonic() < deadline:
            time.sleep(0.01)
        del held
        assert before + 60 * MIB <= limited.highest_bytes <= before + 100 * MIB
        assert limited.limit_bytes > limited.highest_bytes
    finally:
        lift_memory_limit(CPU)


def test_plans_have_room_on_a_cpu_only_where_a_limit_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "ProcessCounters", Books)
    assert limited_memory(CPU) is None
    assert room_on(CPU) is None
    limit_memory(CPU, 800)
    try:
        room = room_on(CPU)
        assert room is not None
        assert room.is_to_be_filled
        assert room.limit_bytes() == 760
    finally:
        lift_memory_limit(CPU)
    assert room_on(CPU) is None


def test_a_limit_beyond_the_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory=976562.50 GiB: cpu has .* GiB; ask for less"):
        limit_memory(CPU, 976562 * GIB + GIB // 2)
    assert limited_memory(CPU) is None


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="needs Linux, and this is darwin"):
        limit_memory(CPU, None)
