"""The devices, links, limits and versions of this machine, of which `accelerate env` has a part: `hf-memopt doctor`.

Facts are plain mappings, as `--json` prints them; those that do not exist or cannot be read are None. Names end in
their unit: GiB, or GB/s (1e9 bytes) in one direction at a time.
"""

import os
import platform
import resource
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from hf_memopt.memory.device_counters import counters_for, device_name
from hf_memopt.text_table import align
from hf_memopt.transfer import clock_for, copier_for
from hf_memopt.transfer.clock import PROBE_BYTES, measure_link
from hf_memopt.transfer.host_memory import CGROUPS, MEMBERSHIP, cgroup_limits, pinned_empty
from hf_memopt.transfer.scratch_file import ScratchFile, check_disk, file_system
from hf_memopt.units import GIB

Facts = dict[str, Any]

_REQUIRED = ("torch", "transformers", "accelerate", "datasets", "safetensors", "psutil")
_OPTIONAL = ("lerobot", "trl", "peft", "diffusers", "neuraloperator", "matplotlib")
# Devices in the host's own memory, such as a CPU.
_UNLINKED = ("cpu", "mps")
_LINK = "{to_host_gb_per_s:.1f} GB/s to the host, {to_device_gb_per_s:.1f} GB/s to the device"
_DISK = (
    "{folder}: {file_system}, {free_gib:.2f} GiB free, {io}, writes {write_gb_per_s:.1f} GB/s, reads "
    "{read_gb_per_s:.1f} GB/s"
)
_IO = {True: "direct I/O", False: "no direct I/O: bytes pass through the page cache"}


def examine(device: str | None = None, disk: str | None = None) -> Facts:
    """Look at one device, or all accelerators, or else the CPU, and at a folder for a disk tier."""
    check_disk(disk)
    devices = [examine_device(found) for found in find_devices(device)]
    host, versions = host_limits(), find_versions()
    problems = find_problems(devices, host, versions, device)
    of_disk = None if disk is None else examine_disk(disk)
    return {"devices": devices, "host": host, "versions": versions, "problems": problems, "disk": of_disk}


def find_devices(name: str | None = None) -> list[torch.device]:
    """Return the devices that a name (`cuda`, `cuda:1`, `cpu`) means; None, all accelerators, or else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator else 0
    there = [torch.device(accelerator.type, index) for index in range(count)] if accelerator else []
    if name is None:
        return there or [torch.device("cpu")]
    candidates = [*there, torch.device("cpu")]
    chosen = [found for found in candidates if name in (found.type, str(found))]
    if not chosen:
        raise ValueError(f"device={name!r} is not there; this machine has {', '.join(map(str, candidates))}")
    return chosen


def examine_device(device: torch.device) -> Facts:
    """Look at one device; copies some 400 MiB over its link, and waits for them. `obstacle` says why facts are None."""
    kind = "rocm" if torch.version.hip and device.type == "cuda" else device.type
    facts: Facts = {"name": str(device), "kind": kind, "model": platform.machine() if kind == "cpu" else kind}
    facts |= dict.fromkeys(("free_gib", "total_gib", "pinned", "pageable", "can_pin"))
    facts |= {"has_counters": False, "obstacle": None}
    if kind in _UNLINKED:
        return facts | {"obstacle": "device and host share one memory: there is no link"}
    try:
        free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
        can_pin = pinned_empty(PROBE_BYTES, device).is_pinned()
        return facts | {
            "model": device_name(device) if device.type in ("cuda", "xpu") else kind,
            "free_gib": free_bytes / GIB,
            "total_gib": total_bytes / GIB,
            "pinned": _link(device, pin_memory=True) if can_pin else None,
            "pageable": _link(device, pin_memory=False),
            "can_pin": can_pin,
            "has_counters": counters_for(device) is not None,
        }
    except RuntimeError as error:  # out of memory and lost devices among them
        return facts | {"obstacle": str(error).splitlines()[0]}


def _link(device: torch.device, pin_memory: bool) -> Facts:
    to_host, to_device = measure_link(copier_for(device, pin_memory), clock_for(device))
    return {"to_host_gb_per_s": to_host / 1e9, "to_device_gb_per_s": to_device / 1e9}


def host_limits(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Facts:
    """Return host memory and its limits; one that is not set is None."""
    memory = psutil.virtual_memory()
    limits = [limit for limit in cgroup_limits(cgroups, membership) if limit < memory.total]
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "total_gib": memory.total / GIB,
        "available_gib": memory.available / GIB,
        "cgroup_limit_gib": min(limits) / GIB if limits else None,
        "locked_limit_gib": None if locked == resource.RLIM_INFINITY else locked / GIB,
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
    }


def examine_disk(folder: str) -> Facts:
    """Look at a folder for a disk tier; writes 64 MiB to a file there that has no name, and reads them."""
    file = ScratchFile(folder)
    return {
        "folder": folder,
        "file_system": file_system(file.folder) or "unknown",
        "free_gib": shutil.disk_usage(folder).free / GIB,
        "direct_io": file.is_direct,  # past the page cache, which takes memory of its own
        "write_gb_per_s": file.write_bytes_per_s / 1e9,
        "read_gb_per_s": file.read_bytes_per_s / 1e9,
    }


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
    devices: list[Facts], host: Facts, versions: dict[str, str | None], asked_for: str | None = None
) -> list[str]:
    problems = [f"{name} is not installed: pip install {name}" for name in _REQUIRED if versions[name] is None]
    if asked_for is None and devices[0]["kind"] == "cpu" and Path("/dev/nvidiactl").exists():
        problems.append(
            "there is an NVIDIA driver, yet torch finds no CUDA device: look at CUDA_VISIBLE_DEVICES, and whether "
            f"torch (built for CUDA {torch.version.cuda}) is too new for the driver (nvidia-smi)"
        )
    limit_gib, available_gib = host["cgroup_limit_gib"], host["available_gib"]
    if limit_gib is not None and limit_gib < available_gib:
        problems.append(
            f"the control group allows {limit_gib:.1f} GiB of host memory, less than the {available_gib:.1f} GiB that "
            "the system calls available and offloading counts on: pass host_budget_gib to ActivationOffloader"
        )
    for device in devices:
        name, free_gib, total_gib = (device[fact] for fact in ("name", "free_gib", "total_gib"))
        if device["obstacle"] is not None and device["kind"] not in _UNLINKED:
            problems.append(f"{name} could not be examined: {device['obstacle']}")
        if device["can_pin"] is False:
            problems.append(
                f"{name}: host memory cannot be pinned, so copies are slow and block the host: raise ulimit -l"
            )
        if free_gib is not None and free_gib < total_gib / 2:
            free = f"{name}: only {free_gib:.1f} of {total_gib:.1f} GiB are free"
            problems.append(f"{free}: end the processes that hold the rest")
    return problems


def page(machine: Facts) -> str:
    host, disk = machine["host"], machine["disk"]
    cgroup_gib, locked_gib = host["cgroup_limit_gib"], host["locked_limit_gib"]
    limits = {
        "memory": f"{host['available_gib']:.2f} GiB available of {host['total_gib']:.2f} GiB",
        "limit of the control group": "none" if cgroup_gib is None else f"{cgroup_gib:.2f} GiB",
        "locked-memory limit (ulimit -l)": "none" if locked_gib is None else f"{1024 * locked_gib:,.0f} MiB",
        "CPUs of this process": str(host["num_cpus"]),
    }
    sections = {
        "Devices": [line for device in machine["devices"] for line in _device_lines(device)],
        "Host": align(limits.items()),
        "Disk": [] if disk is None else [_DISK.format(**disk, io=_IO[disk["direct_io"]])],
        "Versions": align((name, found or "none") for name, found in machine["versions"].items()),
        "Problems": machine["problems"] or ["none found"],
    }
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items() if lines)


def _device_lines(device: Facts) -> list[str]:
    lines = [f"{device['name']}: {device['model']}"]
    if device["free_gib"] is not None:
        lines.append("  memory: {free_gib:.2f} GiB free of {total_gib:.2f} GiB".format(**device))
    links = {title: device[title] for title in ("pinned", "pageable")}
    lines += [f"  link, {title} host memory: {_LINK.format(**link)}" for title, link in links.items() if link]
    return lines if device["obstacle"] is None else [*lines, f"  {device['obstacle']}"]
