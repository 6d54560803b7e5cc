"""Sources of memory figures: the device's allocator, the device, the host, and the peak of a process."""

import logging
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch

from hf_memopt.transfer.host_arena import HostArena, HostHoldings
from hf_memopt.transfer.scratch_file import DiskHoldings, disk_of_process

logger = logging.getLogger(__name__)

# Linux' files of this process: writing 5 to the first has the second's VmHWM begin again.
_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One reading of a device's caching allocator, in bytes where nothing else is said.

    Attributes:
        allocated_bytes: held by tensors.
        peak_allocated_bytes: the highest value since the counter was last reset, by any reader.
        reserved_bytes: taken from the device; bytes that are not allocated are kept for the next tensors.
        inactive_split_bytes: reserved, not allocated, and not returnable: the rest of its block is in use.
        num_alloc_retries: how often the allocator ran out and had to return its cache to the device.
        num_ooms: how often that did not help.
    """

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    inactive_split_bytes: int = 0
    num_alloc_retries: int = 0
    num_ooms: int = 0


class Counters(Protocol):
    """The memory counters of a device, for a `MemoryTracker`. No method may wait for the device."""

    def read(self) -> DeviceMemory:
        """Return the allocator's books, which are kept on the host as memory is requested."""

    def reset_peaks(self) -> None:
        """Reset the peak to the bytes allocated now, for every reader of this counter."""

    def free_and_total(self) -> tuple[int, int]:
        """Return free and total memory of the device in bytes, over all processes."""


class AcceleratorCounters:
    """The counters of torch's caching allocator on one accelerator; a reading costs microseconds."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.accelerator.current_device_index() if device.index is None else device.index

    def read(self) -> DeviceMemory:
        if not torch._C._accelerator_isAllocatorInitialized():
            return DeviceMemory(0, 0, 0)
        # `torch.accelerator.memory_stats` would take ten times longer, to flatten this.
        stats = torch._C._accelerator_getDeviceStats(self._index)
        allocated = stats["allocated_bytes"]["all"]
        return DeviceMemory(
            allocated_bytes=allocated["current"],
            peak_allocated_bytes=allocated["peak"],
            reserved_bytes=stats["reserved_bytes"]["all"]["current"],
            inactive_split_bytes=stats["inactive_split_bytes"]["all"]["current"],
            num_alloc_retries=stats["num_alloc_retries"],
            num_ooms=stats["num_ooms"],
        )

    def reset_peaks(self) -> None:
        if torch._C._accelerator_isAllocatorInitialized():
            torch.accelerator.reset_peak_memory_stats(self._index)

    def free_and_total(self) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(self._index)


def device_name(device: torch.device) -> str:
    """Return the driver's name of the device, such as "NVIDIA H200"; of a CPU the model that the kernel names."""
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return f"CPU {found.group(1) if found else platform.machine()}"


def counters_for(device: torch.device) -> Counters | None:
    """Return the counters of a device, or None, with one log line, where torch keeps none."""
    if device.type == "cpu":
        logger.info("memory on cpu: torch keeps no counters there, so only the process's host memory is reported")
        return None
    counters = AcceleratorCounters(device)
    try:
        counters.read()
        counters.free_and_total()
    except RuntimeError as error:
        logger.warning("memory on %s: no allocator counters (%s), so only host memory is reported", device, str(error))
        return None
    return counters


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory, in bytes, and the disk that offloading takes in its place.

    Attributes:
        rss_bytes: resident memory of this process, pages that it shares with others counted in full.
        pss_bytes: the same with shared pages divided among their users; None where not asked for, or not on Linux.
        pinned_bytes: page-locked by torch's own allocator, rounded up to powers of two as it rounds; None where no CUDA
            device is in use. Blocks of an `ActivationOffloader` or an `OffloadedTeacher` are pinned by other means.
        offload: memory that `ActivationOffloader`s hold for saved activations.
        disk: length of their files on disks, and bytes written to these.
        available_bytes: bytes that the machine could still give to processes.
        total_bytes: its memory.
    """

    rss_bytes: int
    pss_bytes: int | None
    pinned_bytes: int | None
    offload: HostHoldings
    disk: DiskHoldings
    available_bytes: int
    total_bytes: int


class Host:
    def __init__(self) -> None:
        self._process = psutil.Process()

    def rss_bytes(self) -> int:
        """Resident memory of this process; some 10 microseconds."""
        return int(self._process.memory_info().rss)

    def read(self, *, pss: bool = False) -> HostMemory:
        # With `pss` the kernel walks all page tables, which takes long in a large process.
        machine = psutil.virtual_memory()
        return HostMemory(
            rss_bytes=self.rss_bytes(),
            pss_bytes=getattr(self._process.memory_full_info(), "pss", None) if pss else None,
            pinned_bytes=_pinned_bytes(),
            offload=HostArena.of_process(),
            disk=disk_of_process(),
            available_bytes=int(machine.available),
            total_bytes=int(machine.total),
        )


def _pinned_bytes() -> int | None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def reset_peak(device: torch.device) -> None:
    """Reset the peak to the memory in use now."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif os.access(_RESET, os.W_OK):
        _RESET.write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes since `reset_peak`: that torch has allocated on an accelerator, resident ones on a CPU.

    None on a CPU whose system does not tell.
    """
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    if not os.access(_RESET, os.W_OK):
        return None
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    return 1024 * int(kib)
