"""Devices and hosts as the doctor describes them."""

from typing import Any

Facts = dict[str, Any]

_UNKNOWN = {"free_gib": None, "total_gib": None, "pinned": None, "pageable": None, "can_pin": None}


def unlinked(name: str, kind: str, model: str, obstacle: str) -> Facts:
    """Return a device of which nothing could be measured."""
    return {"name": name, "kind": kind, "model": model, **_UNKNOWN, "has_counters": False, "obstacle": obstacle}


GPU: Facts = {
    "name": "cuda:0",
    "kind": "cuda",
    "model": "Some GPU",
    "free_gib": 70.0,
    "total_gib": 80.0,
    "pinned": {"to_host_gb_per_s": 24.0, "to_device_gb_per_s": 25.0},
    "pageable": {"to_host_gb_per_s": 5.0, "to_device_gb_per_s": 6.0},
    "can_pin": True,
    "has_counters": True,
    "obstacle": None,
}

HOST: Facts = {
    "total_gib": 64,
    "available_gib": 60,
    "cgroup_limit_gib": None,
    "locked_limit_gib": 8 / 1024,
    "num_cpus": 8,
}

CPU = unlinked("cpu", "cpu", "x86_64", "no link")
