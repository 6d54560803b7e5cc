"""The host: memory, limits and versions."""

import os
import platform
import resource
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from hf_memopt.transfer.host_memory import CGROUPS, MEMBERSHIP, cgroup_limits
from hf_memopt.units import GIB

REQUIRED = ("torch", "transformers", "accelerate", "datasets", "safetensors", "psutil")
OPTIONAL = ("lerobot", "trl", "peft", "diffusers", "neuraloperator", "matplotlib")


@dataclass(frozen=True)
class HostLimits:
    """Host memory. A limit that is not set is None."""

    total_gib: float
    available_gib: float
    cgroup_limit_gib: float | None
    locked_limit_gib: float | None
    num_cpus: int


def host_limits(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> HostLimits:
    """Return the memory of the host, and how much of it this process may take and lock."""
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


def find_versions() -> dict[str, str | None]:
    """Return versions by name; None for packages that are not installed."""
    driver = Path("/sys/module/nvidia/version")
    return {
        "python": platform.python_version(),
        "hf_memopt": _version("hf_memopt"),
        **{name: _version(name) for name in (*REQUIRED, *OPTIONAL)},
        "CUDA that torch was built for": torch.version.cuda,
        "NVIDIA driver": driver.read_text().strip() if driver.exists() else None,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
