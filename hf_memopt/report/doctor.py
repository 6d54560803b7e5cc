"""The devices, limits and versions of this machine: `hf-memopt doctor`."""

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from hf_memopt.memory.device_counters import counters_for
from hf_memopt.text_table import align
from hf_memopt.transfer import clock_for, copier_for
from hf_memopt.transfer.host_memory import CGROUPS, MEMBERSHIP, cgroup_limits, pinned_empty
from hf_memopt.transfer.link import measure_link
from hf_memopt.transfer.scratch_file import ScratchFile, check_disk, file_system
from hf_memopt.units import GIB, MIB

_REQUIRED = ("torch", "transformers", "accelerate", "datasets", "safetensors", "psutil")
_OPTIONAL = ("lerobot", "trl", "peft", "diffusers", "neuraloperator", "matplotlib")
_PINNED_PROBE_BYTES = 16 * MIB
# Less free memory than this share is a problem.
_FREE_SHARE = 0.5


@dataclass(frozen=True)
class LinkSpeed:
    """Bandwidth between device and host in GB/s (1e9 bytes), one direction at a time."""

    to_host_gb_per_s: float
    to_device_gb_per_s: float


@dataclass(frozen=True)
class Device:
    """One device, such as `cuda:0`. Facts that do not exist there or cannot be read are None; `obstacle` says why."""

    name: str
    kind: str  # tells `rocm` from `cuda`
    model: str
    free_gib: float | None = None
    total_gib: float | None = None
    pinned: LinkSpeed | None = None  # from and to such host memory
    pageable: LinkSpeed | None = None
    can_pin: bool | None = None
    has_counters: bool = False
    obstacle: str | None = None


@dataclass(frozen=True)
class HostLimits:
    """Host memory. A limit that is not set is None."""

    total_gib: float
    available_gib: float
    cgroup_limit_gib: float | None
    locked_limit_gib: float | None
    num_cpus: int


@dataclass(frozen=True)
class DiskFacts:
    """A folder for activations that leave host memory; bandwidth in GB/s (1e9 bytes), one direction at a time."""

    folder: str
    file_system: str
    free_gib: float
    direct_io: bool  # past the page cache, which takes memory of its own
    write_gb_per_s: float
    read_gb_per_s: float


@dataclass(frozen=True)
class Machine:
    """The facts about a machine; versions of packages that are not installed are None, and a disk not asked for."""

    devices: list[Device]
    host: HostLimits
    versions: dict[str, str | None]
    problems: list[str]
    disk: DiskFacts | None = None


def examine(device: str | None = None, disk: str | None = None) -> Machine:
    """Look at one device, or all accelerators, or else the CPU, and at a folder for a disk tier."""
    check_disk(disk)
    devices = [examine_device(found) for found in find_devices(device)]
    host, versions = host_limits(), find_versions()
    problems = find_problems(devices, host, versions, device)
    return Machine(devices, host, versions, problems, None if disk is None else examine_disk(disk))


def find_devices(name: str | None = None) -> list[torch.device]:
    """Return the devices that a name (`cuda`, `cuda:1`, `cpu`) means; None, all accelerators, or else the CPU."""
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
    except RuntimeError as error:  # out of memory and lost devices among them
        return Device(str(device), kind, kind, obstacle=str(error).splitlines()[0])


def _link(device: torch.device, pin_memory: bool) -> LinkSpeed:
    to_host, to_device = measure_link(copier_for(device, pin_memory), clock_for(device))
    return LinkSpeed(to_host / 1e9, to_device / 1e9)


def host_limits(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> HostLimits:
    memory = psutil.virtual_memory()
    limits = [limit for limit in cgroup_limits(cgroups, membership) if limit < memory.total]
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostLimits(
        total_gib=memory.total / GIB,
        available_gib=memory.available / GIB,
        cgroup_limit_gib=min(limits) / GIB if limits else None,
        locked_limit_gib=None if locked == resource.RLIM_INFINITY else locked / GIB,
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
    )


def examine_disk(folder: str) -> DiskFacts:
    """Look at a folder for a disk tier; writes 64 MiB to a file there that has no name, and reads them."""
    file = ScratchFile(folder)
    return DiskFacts(
        folder=folder,
        file_system=file_system(file.folder) or "unknown",
        free_gib=shutil.disk_usage(folder).free / GIB,
        direct_io=file.is_direct,
        write_gb_per_s=file.write_bytes_per_s / 1e9,
        read_gb_per_s=file.read_bytes_per_s / 1e9,
    )


def find_versions() -> dict[str, str | None]:
    driver = Path("/sys/module/nvidia/version")
    return {
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("hf_memopt", *_REQUIRED, *_OPTIONAL)},
        "CUDA that torch was built for": torch.version.cuda,
        "NVIDIA driver": driver.read_text().strip() if driver.exists() else None,
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_problems(
    devices: list[Device], host: HostLimits, versions: dict[str, str | None], asked_for: str | None = None
) -> list[str]:
    problems = [f"{name} is not installed: pip install {name}" for name in _REQUIRED if versions[name] is None]
    if asked_for is None and devices[0].kind == "cpu" and Path("/dev/nvidiactl").exists():
        problems.append(
            "there is an NVIDIA driver, yet torch finds no CUDA device: look at CUDA_VISIBLE_DEVICES, and whether "
            f"torch (built for CUDA {torch.version.cuda}) is too new for the driver (nvidia-smi)"
        )
    if host.cgroup_limit_gib is not None and host.cgroup_limit_gib < host.available_gib:
        problems.append(
            f"the control group allows {host.cgroup_limit_gib:.1f} GiB of host memory, less than the "
            f"{host.available_gib:.1f} GiB that the system calls available and offloading counts on: pass "
            "host_budget_gib to ActivationOffloader"
        )
    return [*problems, *(problem for device in devices for problem in _device_problems(device))]


def _device_problems(device: Device) -> Iterator[str]:
    if device.obstacle is not None and device.kind not in ("cpu", "mps"):
        yield f"{device.name} could not be examined: {device.obstacle}"
    if device.can_pin is False:
        yield f"{device.name}: host memory cannot be pinned, so copies are slow and block the host: raise ulimit -l"
    if device.free_gib is not None and device.total_gib and device.free_gib < _FREE_SHARE * device.total_gib:
        yield (
            f"{device.name}: only {device.free_gib:.1f} of {device.total_gib:.1f} GiB are free: "
            "end the processes that hold the rest"
        )


def page(machine: Machine) -> str:
    sections = {
        "Devices": [line for device in machine.devices for line in _device_lines(device)],
        "Host": _host_lines(machine.host),
        **({} if machine.disk is None else {"Disk": [_disk_line(machine.disk)]}),
        "Versions": align((name, found or "none") for name, found in machine.versions.items()),
        "Problems": machine.problems or ["none found"],
    }
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items())


def _device_lines(device: Device) -> Iterator[str]:
    yield f"{device.name}: {device.model}"
    if device.total_gib is not None and device.free_gib is not None:
        yield f"  memory: {device.free_gib:.2f} GiB free of {device.total_gib:.2f} GiB"
    for title, link in (("pinned", device.pinned), ("pageable", device.pageable)):
        if link is not None:
            speed = f"{link.to_host_gb_per_s:.1f} GB/s to the host, {link.to_device_gb_per_s:.1f} GB/s to the device"
            yield f"  link, {title} host memory: {speed}"
    if device.obstacle is not None:
        yield f"  {device.obstacle}"


def _host_lines(host: HostLimits) -> list[str]:
    cgroup, locked_gib = host.cgroup_limit_gib, host.locked_limit_gib
    return align(
        [
            ("memory", f"{host.available_gib:.2f} GiB available of {host.total_gib:.2f} GiB"),
            ("limit of the control group", "none" if cgroup is None else f"{cgroup:.2f} GiB"),
            ("locked-memory limit (ulimit -l)", "none" if locked_gib is None else f"{1024 * locked_gib:,.0f} MiB"),
            ("CPUs of this process", str(host.num_cpus)),
        ]
    )


def _disk_line(disk: DiskFacts) -> str:
    past = "direct I/O" if disk.direct_io else "no direct I/O: bytes pass through the page cache"
    speeds = f"writes {disk.write_gb_per_s:.1f} GB/s, reads {disk.read_gb_per_s:.1f} GB/s"
    return f"{disk.folder}: {disk.file_system}, {disk.free_gib:.2f} GiB free, {past}, {speeds}"
