"""A limit for the memory that training takes on a device, and the peak below it."""

import os
import sys
import threading
import time
import weakref
from pathlib import Path

import torch

from hf_memopt.memory.device_counters import AcceleratorCounters, Counters, DeviceMemory
from hf_memopt.transfer.host_memory import available_bytes
from hf_memopt.units import format_bytes

_STATM, _PAGE = Path("/proc/self/statm"), os.sysconf("SC_PAGE_SIZE")
_INTERVAL_S = 0.004  # between samples of a process's memory
_LIMITED: dict[str, "LimitedMemory"] = {}  # by type of device


class ProcessCounters:
    """Counts this process's memory that belongs to no file. A thread samples it for the peak. Linux only."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise ValueError(f"a limit for the memory of a process needs Linux, and this is {sys.platform}")
        self._peak_bytes = 0
        threading.Thread(target=_sample, args=[weakref.ref(self)], name="memory samples", daemon=True).start()

    def read(self) -> DeviceMemory:
        _, resident, shared, *_ = _STATM.read_text().split()
        now = _PAGE * (int(resident) - int(shared))
        self._peak_bytes = max(self._peak_bytes, now)
        return DeviceMemory(now, self._peak_bytes, now)

    def reset_peaks(self) -> None:
        self._peak_bytes = 0
        self.read()

    def free_and_total(self) -> tuple[int, int]:
        return available_bytes(), self.read().allocated_bytes + available_bytes()


def _sample(reference: "weakref.ref[ProcessCounters]") -> None:
    """Read the counters again and again, as long as somebody has them."""
    while (counters := reference()) is not None:
        counters.read()
        del counters
        time.sleep(_INTERVAL_S)


class LimitedMemory:
    """The counters of a device, whose memory ends at a limit.

    Others may reset their peak: `highest_bytes` is that since `restart`, `total_highest_bytes` that since the start.
    """

    def __init__(self, counters: Counters, limit_bytes: int) -> None:
        self._counters, self.limit_bytes = counters, limit_bytes
        self._highest_bytes = self._earlier_bytes = 0

    @property
    def total_highest_bytes(self) -> int:
        return max(self._earlier_bytes, self.highest_bytes)

    @property
    def highest_bytes(self) -> int:
        return max(self._highest_bytes, self._counters.read().peak_allocated_bytes)

    def restart(self) -> None:
        self._earlier_bytes = self.total_highest_bytes
        self._counters.reset_peaks()
        self._highest_bytes = 0

    def read(self) -> DeviceMemory:
        return self._counters.read()

    def reset_peaks(self) -> None:
        self._highest_bytes = self.highest_bytes
        self._counters.reset_peaks()

    def free_and_total(self) -> tuple[int, int]:
        return max(0, self.limit_bytes - self.read().reserved_bytes), self.limit_bytes


def limit_memory(device: torch.device, limit_bytes: int | None) -> LimitedMemory:
    """Limit the memory of a device that this process plans to take.

    Args:
        device: an accelerator, or the CPU.
        limit_bytes: torch's allocator raises an OutOfMemoryError beyond them. On a CPU nothing does. None: what the
            process has, and what is free.

    Raises:
        ValueError: the device has less, or, on a CPU, the system is not Linux.
    """
    counters: Counters = ProcessCounters() if device.type == "cpu" else AcceleratorCounters(device)
    free_bytes, total_bytes = counters.free_and_total()
    used_bytes = counters.read().reserved_bytes
    if limit_bytes is None:
        limit_bytes = min(used_bytes + free_bytes, total_bytes)
    elif limit_bytes > total_bytes:
        raise ValueError(f"memory={format_bytes(limit_bytes)}: {device} has {format_bytes(total_bytes)}; ask for less")
    elif device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, device)
    counters.reset_peaks()
    _LIMITED[device.type] = LimitedMemory(counters, limit_bytes)
    return _LIMITED[device.type]


def limited_memory(device: torch.device) -> LimitedMemory | None:
    """Return the memory of a device whose limit was set, or None where none was."""
    return _LIMITED.get(device.type)


def lift_memory_limit(device: torch.device) -> None:
    if _LIMITED.pop(device.type, None) is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)
