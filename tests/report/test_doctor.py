import resource
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from counted_allocator import FakeCounters
from doctor_machines import CPU, GPU, HOST, Facts, unlinked
from torch import Tensor

from hf_memopt.report import doctor
from hf_memopt.report.doctor import (
    examine,
    examine_device,
    examine_disk,
    find_devices,
    find_problems,
    find_versions,
    host_limits,
    page,
)
from hf_memopt.transfer import Copier, SyncCopier
from hf_memopt.transfer.clock import HostClock
from hf_memopt.units import GIB


def machine_of(devices: list[Facts], problems: list[str]) -> Facts:
    return {"devices": devices, "host": HOST, "versions": find_versions(), "problems": problems, "disk": None}


# ------------------------------------------------------------------------------------------------ devices


@pytest.mark.parametrize("can_pin", [True, False])
def test_an_accelerator_is_measured(monkeypatch: pytest.MonkeyPatch, can_pin: bool) -> None:
    """Measure a CPU with stand-ins for the parts of an accelerator."""
    copiers: list[Copier] = []

    def make_copier(device: torch.device, pin_memory: bool) -> Copier:
        copiers.append(SyncCopier())
        return copiers[-1]

    def make_pinned(num_bytes: int, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(is_pinned=lambda: can_pin)

    monkeypatch.setattr(doctor, "copier_for", make_copier)
    monkeypatch.setattr(doctor, "clock_for", lambda device: HostClock())
    monkeypatch.setattr(doctor, "pinned_empty", make_pinned)
    monkeypatch.setattr(doctor, "counters_for", lambda device: FakeCounters())
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (3 * GIB, 4 * GIB))
    found = examine_device(torch.device("hpu:0"))
    assert [found[fact] for fact in ("free_gib", "total_gib", "can_pin", "has_counters")] == [3, 4, can_pin, True]
    # Pinned memory is measured only if it can be pinned.
    assert (found["pinned"] is not None) == can_pin
    assert found["pageable"] is not None
    assert len(copiers) == 1 + can_pin
    assert all(copier.bytes_to_host == copier.bytes_to_device == 6 * 16 * 2**20 for copier in copiers)


@pytest.mark.parametrize("name", ["nonsense", "cpu:7", "vulkan"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"device='{name}' is no"):
        find_devices(name)


# ------------------------------------------------------------------------------------------------ host and versions


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/job/step", {"job/step/memory.max": "3000", "job/memory.max": "2000", "memory.max": "max"}, 2000),
        ("0::/job", {"job/memory.max": "max"}, None),
        ("0::/of/the/host", {"memory.max": "1000"}, 1000),
        ("3:cpu:/a\n4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "4096", "memory.max": "8192"}, 4096),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("", {}, None),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path, membership: str, limits: dict[str, str], expected: int | None
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, limit in limits.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(limit + "\n")
    found = host_limits(tmp_path / "groups", tmp_path / "membership")
    assert found["cgroup_limit_gib"] == (None if expected is None else expected / GIB)


@pytest.mark.parametrize(("limit", "expected"), [(resource.RLIM_INFINITY, None), (8 * 2**20, 8 / 1024)])
def test_the_locked_memory_limit(monkeypatch: pytest.MonkeyPatch, limit: int, expected: float | None) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert host_limits()["locked_limit_gib"] == expected
    assert host_limits()["total_gib"] == psutil.virtual_memory().total / GIB


def test_a_disk_is_measured_and_has_a_line(tmp_path: Path) -> None:
    found = examine_disk(str(tmp_path))
    assert found["write_gb_per_s"] > 0
    assert found["read_gb_per_s"] > 0
    assert found["free_gib"] == pytest.approx(psutil.disk_usage(str(tmp_path)).free / GIB, rel=0.1)
    assert list(tmp_path.iterdir()) == []
    given = {"folder": "/nvme", "file_system": "ext4", "free_gib": 100.0, "direct_io": True}
    given |= {"write_gb_per_s": 2.04, "read_gb_per_s": 3.0}
    machine = machine_of([CPU], [])
    assert "\nDisk\n" not in page(machine)
    line = "Disk\n  /nvme: ext4, 100.00 GiB free, direct I/O, writes 2.0 GB/s, reads 3.0 GB/s\n"
    assert line in page({**machine, "disk": given})
    assert "pass through the page cache" in page({**machine, "disk": {**given, "direct_io": False}})


def test_a_disk_that_is_no_folder_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^disk='missing' is no folder"):
        examine(disk="missing")


# ------------------------------------------------------------------------------------------------ problems


def test_a_sound_machine_has_no_problems() -> None:
    assert find_problems([GPU], HOST, find_versions()) == []


@pytest.mark.parametrize(
    ("device", "host", "versions", "complaint"),
    [
        (GPU, HOST, {"datasets": None}, "datasets is not installed: pip install datasets"),
        (GPU, {**HOST, "cgroup_limit_gib": 16.0}, {}, "allows 16.0 GiB of host memory, less than the 60.0 GiB"),
        ({**GPU, "can_pin": False}, HOST, {}, "cuda:0: host memory cannot be pinned"),
        ({**GPU, "free_gib": 30.0}, HOST, {}, "cuda:0: only 30.0 of 80.0 GiB are free"),
        (unlinked("xpu:0", "xpu", "xpu", "lost"), HOST, {}, "xpu:0 could not be examined: lost"),
    ],
)
def test_each_problem_is_found_alone(
    device: Facts, host: Facts, versions: Mapping[str, str | None], complaint: str
) -> None:
    (problem,) = find_problems([device], host, {**find_versions(), **versions})
    assert complaint in problem


def test_a_device_that_fails_becomes_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate a lot.")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", fail)
    device = examine_device(torch.device("cuda:1"))
    assert device["obstacle"] == "CUDA out of memory."
    (problem,) = find_problems([device], HOST, find_versions())
    assert problem == "cuda:1 could not be examined: CUDA out of memory."


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_names_everything() -> None:
    machine = machine_of([GPU], ["something is wrong"])
    lines = [line.strip() for line in page(machine).splitlines()]
    assert "memory: 70.00 GiB free of 80.00 GiB" in lines
    assert "link, pinned host memory: 24.0 GB/s to the host, 25.0 GB/s to the device" in lines
    assert "link, pageable host memory: 5.0 GB/s to the host, 6.0 GB/s to the device" in lines
    assert "locked-memory limit (ulimit -l)  8 MiB" in lines
    assert lines[-2:] == ["Problems", "something is wrong"]
    sound = machine_of([CPU], [])
    assert page(sound).endswith("Problems\n  none found")


def section(text: str, title: str) -> list[str]:
    """Return a section's lines without their common indentation."""
    blocks = {lines[0]: lines[1:] for lines in (block.splitlines() for block in text.split("\n\n"))}
    assert all(line.startswith("  ") for line in blocks[title])
    return [line[2:] for line in blocks[title]]


def page_of(*devices: Facts, host: Facts = HOST) -> str:
    versions = {"torch": "2.11", "datasets": None}
    return page({"devices": list(devices), "host": host, "versions": versions, "problems": ["a", "b"], "disk": None})


def test_sections_are_in_order() -> None:
    titles = [block.splitlines()[0] for block in page_of(GPU, CPU).split("\n\n")]
    assert titles == ["Devices", "Host", "Versions", "Problems"]
    assert section(page_of(GPU), "Problems") == ["a", "b"]


def test_each_device_says_what_is_known_of_it() -> None:
    lost = unlinked("xpu:0", "xpu", "Other GPU", "lost")
    unpinned = {**GPU, "name": "cuda:1", "pinned": None, "free_gib": None}
    assert section(page_of(GPU, unpinned, lost), "Devices") == [
        "cuda:0: Some GPU",
        "  memory: 70.00 GiB free of 80.00 GiB",
        "  link, pinned host memory: 24.0 GB/s to the host, 25.0 GB/s to the device",
        "  link, pageable host memory: 5.0 GB/s to the host, 6.0 GB/s to the device",
        "cuda:1: Some GPU",
        "  link, pageable host memory: 5.0 GB/s to the host, 6.0 GB/s to the device",
        "xpu:0: Other GPU",
        "  lost",
    ]


@pytest.mark.parametrize(
    ("limits", "lines"),
    [
        ({}, ["limit of the control group      none", "locked-memory limit (ulimit -l)  8 MiB"]),
        (
            {"cgroup_limit_gib": 1.5, "locked_limit_gib": 2.0},
            ["limit of the control group      1.50 GiB", "locked-memory limit (ulimit -l)  2,048 MiB"],
        ),
        ({"locked_limit_gib": None}, ["limit of the control group      none", "locked-memory limit (ulimit -l)  none"]),
    ],
)
def test_limits_that_there_are_not_are_called_none(limits: dict[str, float | None], lines: list[str]) -> None:
    found = section(page_of(CPU, host={**HOST, **limits}), "Host")
    assert found[0].split() == ["memory", "60.00", "GiB", "available", "of", "64.00", "GiB"]
    assert [" ".join(line.split()) for line in found[1:3]] == [" ".join(line.split()) for line in lines]
    assert found[3].split()[-1] == "8"


def test_a_package_that_is_missing_is_called_none() -> None:
    assert section(page_of(CPU), "Versions") == ["torch     2.11", "datasets  none"]
