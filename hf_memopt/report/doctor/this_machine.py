"""The report of `hf-memopt doctor` on the machine."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_memopt.report.doctor.devices import Device, examine_device, find_devices
from hf_memopt.report.doctor.features import Feature, find_features, obstacle_to_compile
from hf_memopt.report.doctor.host import REQUIRED, HostLimits, find_versions, host_limits

# A device is reported as a problem if less than this share of its memory is free.
_FREE_SHARE = 0.5


@dataclass(frozen=True)
class Machine:
    """The facts about a machine; versions of packages that are not installed are None."""

    devices: list[Device]
    host: HostLimits
    versions: dict[str, str | None]
    features: list[Feature]
    problems: list[str]


def examine(device: str | None = None) -> Machine:
    """Look at this machine; see `examine_device` for what it costs.

    Args:
        device: look at this one only; None, all accelerators, or the CPU where there is none.

    Raises:
        ValueError: there is no such device.
    """
    devices = [examine_device(found) for found in find_devices(device)]
    host, versions = host_limits(), find_versions()
    features = find_features(devices[0], obstacle_to_compile(devices[0].kind))
    return Machine(devices, host, versions, features, find_problems(devices, host, versions, device))


def find_problems(
    devices: list[Device], host: HostLimits, versions: dict[str, str | None], asked_for: str | None = None
) -> list[str]:
    """Return the features likely to fail or to be slow, each with its remedy."""
    problems = [f"{name} is not installed: pip install {name}" for name in REQUIRED if versions[name] is None]
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
