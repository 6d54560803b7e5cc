"""The devices of this machine, and how fast their links to the host are."""

import platform
from dataclasses import dataclass

import torch

from hf_memopt.memory.device_counters import counters_for
from hf_memopt.transfer import clock_for, copier_for
from hf_memopt.transfer.host_memory import pinned_empty
from hf_memopt.transfer.link import measure_link
from hf_memopt.units import GIB, MIB

_PINNED_PROBE_BYTES = 16 * MIB


@dataclass(frozen=True)
class LinkSpeed:
    """Bandwidth between device and host in GB/s (1e9 bytes), one direction at a time."""

    to_host_gb_per_s: float
    to_device_gb_per_s: float


@dataclass(frozen=True)
class Device:
    """One device. Facts that do not exist there or could not be read are None, and `obstacle` says why.

    Attributes:
        name: such as `cuda:0`.
        kind: the type of the device, with `rocm` told apart from `cuda`.
        model: as its driver calls it.
        pinned: link from and to page-locked host memory.
        pageable: link from and to ordinary host memory.
        can_pin: whether a block of 16 MiB could be page-locked.
        has_counters: whether torch counts allocations there.
    """

    name: str
    kind: str
    model: str
    free_gib: float | None = None
    total_gib: float | None = None
    pinned: LinkSpeed | None = None
    pageable: LinkSpeed | None = None
    can_pin: bool | None = None
    has_counters: bool = False
    obstacle: str | None = None


def find_devices(name: str | None = None) -> list[torch.device]:
    """Return the devices that a name (`cuda`, `cuda:1`, `cpu`) means; None, all accelerators, or else the CPU.

    Raises:
        ValueError: this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator else 0
    there = [torch.device(accelerator.type, index) for index in range(count)] if accelerator else []
    if name is None:
        return there or [torch.device("cpu")]
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is not a device: {str(error).splitlines()[0]}") from error
    candidates = [*there, torch.device("cpu")]
    chosen = [found for found in candidates if found.type == device.type and device.index in (None, found.index)]
    if not chosen:
        raise ValueError(f"device={name!r} is not there; this machine has {', '.join(map(str, candidates))}")
    return chosen


def examine_device(device: torch.device) -> Device:
    """Look at one device; copies some 400 MiB over its link, and waits for them."""
    if device.type == "cpu":
        return Device("cpu", "cpu", platform.machine(), obstacle="the CPU's memory is the host's: there is no link")
    kind = "rocm" if torch.version.hip and device.type == "cuda" else device.type
    if kind == "mps":
        return Device(str(device), kind, kind, obstacle="device and host share one memory: there is no link")
    try:
        return _examine_accelerator(device, kind)
    except RuntimeError as error:  # out of memory and lost devices among them
        return Device(str(device), kind, kind, obstacle=str(error).splitlines()[0])


def _examine_accelerator(device: torch.device, kind: str) -> Device:
    free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
    can_pin = pinned_empty(_PINNED_PROBE_BYTES, device).is_pinned()
    return Device(
        str(device),
        kind,
        model=torch.get_device_module(device).get_device_name(device) if device.type in ("cuda", "xpu") else kind,
        free_gib=free_bytes / GIB,
        total_gib=total_bytes / GIB,
        pinned=_link(device, pin_memory=True) if can_pin else None,
        pageable=_link(device, pin_memory=False),
        can_pin=can_pin,
        has_counters=counters_for(device) is not None,
    )


def _link(device: torch.device, pin_memory: bool) -> LinkSpeed:
    to_host, to_device = measure_link(copier_for(device, pin_memory), clock_for(device))
    return LinkSpeed(to_host / 1e9, to_device / 1e9)
