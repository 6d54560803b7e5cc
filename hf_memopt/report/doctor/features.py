"""Features of this library on a device, and the obstacles of those that do not work."""

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from typing import Literal

from hf_memopt.report.doctor.devices import Device

Status = Literal["on", "off", "untried"]


@dataclass(frozen=True)
class Feature:
    """A feature of this library on this machine, and the reason for its state.

    `untried` is expected to work, and was never tested on this kind of device.
    """

    name: str
    status: Status
    reason: str


def find_features(device: Device, compile_obstacle: str | None) -> list[Feature]:
    """Return the features of this library on a device."""
    kind = device.kind
    offloads = _offloading(kind)
    return [
        Feature("activation offloading", *offloads),
        Feature("teacher offloading", *offloads),
        Feature("recomputation", "on", "SelectiveCheckpoint, on any device"),
        Feature("pinned host memory", *_pinning(device)),
        Feature("peak memory by phase", *_counting(device)),
        Feature("out-of-memory report", *_reporting_oom(kind)),
        Feature("allocator snapshot", *_only_cuda(kind, "records after torch.cuda.memory._record_memory_history()")),
        Feature("leak detection", "on", "counts live storages, on any device"),
        Feature("torch.compile", *(("off", compile_obstacle) if compile_obstacle else ("on", "its compiler is there"))),
    ]


def obstacle_to_compile(kind: str) -> str | None:
    """Say why torch.compile cannot generate code for a kind of device; None if nothing is known to be missing."""
    if kind == "mps":
        return "not examined on this kind of device"
    if kind != "cpu":
        return None if importlib.util.find_spec("triton") else "the package triton is not installed"
    # As torch._inductor.config.cpp.cxx chooses it.
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    return None if shutil.which(compiler) else f"the C++ compiler {compiler} is not installed (CXX names another)"


def _offloading(kind: str) -> tuple[Status, str]:
    if kind == "cpu":
        return "off", "what runs on the CPU is in host memory already; SyncCopier() performs the copies, to try them"
    if kind == "mps":
        return "off", "device and host share one memory, so that copies would free nothing"
    return _proven(kind, "copies on side streams, both directions at once")


def _pinning(device: Device) -> tuple[Status, str]:
    if device.can_pin is None:
        return "off", device.obstacle or "not examined"
    if not device.can_pin:
        return "off", "a block of 16 MiB could not be page-locked: raise the locked-memory limit (ulimit -l)"
    return "on", "a block of 16 MiB was page-locked" + (
        "" if device.kind in ("cuda", "rocm") else "; torch rounds sizes up to powers of two here"
    )


def _counting(device: Device) -> tuple[Status, str]:
    if not device.has_counters:
        return "off", f"torch keeps no allocator counters on {device.kind}: host memory only"
    return _proven(device.kind, "from the allocator's counters, without waiting for the device")


def _reporting_oom(kind: str) -> tuple[Status, str]:
    if kind in ("cpu", "mps"):
        return "off", f"on {kind} torch raises a plain RuntimeError when memory runs out"
    return _proven(kind, "explain_oom adds it to torch.OutOfMemoryError")


def _only_cuda(kind: str, reason: str) -> tuple[Status, str]:
    return _proven(kind, reason) if kind in ("cuda", "rocm") else ("off", "needs CUDA")


def _proven(kind: str, reason: str) -> tuple[Status, str]:
    return ("on", reason) if kind == "cuda" else ("untried", f"the same code as on CUDA, never run on {kind}")
