"""What the doctor finds out about a machine, and what it makes of it."""

import json
import resource
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from counted_allocator import FakeCounters
from torch import Tensor

from hf_memopt.cli import main
from hf_memopt.report.doctor import Machine, devices, examine, page
from hf_memopt.report.doctor.devices import Device, LinkSpeed, examine_device, find_devices
from hf_memopt.report.doctor.features import find_features, obstacle_to_compile
from hf_memopt.report.doctor.host import HostLimits, find_versions, host_limits
from hf_memopt.report.doctor.this_machine import find_problems
from hf_memopt.transfer import Copier, SyncCopier
from hf_memopt.transfer.clock import HostClock

GIB = 2**30
GPU = Device(
    "cuda:0",
    "cuda",
    "Some GPU",
    free_gib=70.0,
    total_gib=80.0,
    pinned=LinkSpeed(24.0, 25.0),
    pageable=LinkSpeed(5.0, 6.0),
    can_pin=True,
    has_counters=True,
)
HOST = HostLimits(total_gib=64, available_gib=60, cgroup_limit_gib=None, locked_limit_gib=8 / 1024, num_cpus=8)
CPU = Device("cpu", "cpu", "x86_64", obstacle="no link")


def statuses(device: Device) -> dict[str, str]:
    return {feature.name: feature.status for feature in find_features(device, None)}


def test_everything_is_on_with_cuda() -> None:
    assert set(statuses(GPU).values()) == {"on"}


@pytest.mark.parametrize("kind", ["xpu", "rocm", "hpu"])
def test_what_never_ran_on_a_device_is_not_called_on(kind: str) -> None:
    found = statuses(replace(GPU, kind=kind))
    assert {name for name, status in found.items() if status == "on"} == {
        "recomputation",
        "pinned host memory",  # it was tried just now
        "leak detection",
        "torch.compile",
    }
    assert found["allocator snapshot"] == ("untried" if kind == "rocm" else "off")


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_where_offloading_frees_nothing_it_is_off(kind: str) -> None:
    device = Device(kind, kind, kind, obstacle="no link")
    on = {name for name, status in statuses(device).items() if status == "on"}
    assert on == {"recomputation", "leak detection", "torch.compile"}
    assert statuses(device)["activation offloading"] == "off"
    assert all(feature.reason for feature in find_features(device, None))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    obstacle = obstacle_to_compile("cpu")
    assert obstacle is not None
    assert "no-such-compiler" in obstacle
    compiles = find_features(CPU, obstacle)[-1]
    assert (compiles.status, compiles.reason) == ("off", obstacle)
    monkeypatch.setenv("CXX", "sh")
    assert obstacle_to_compile("cpu") is None


def test_a_sound_machine_has_no_problems() -> None:
    assert find_problems([GPU], HOST, find_versions()) == []


@pytest.mark.parametrize(
    ("device", "host", "versions", "complaint"),
    [
        (GPU, HOST, {"datasets": None}, "datasets is not installed: pip install datasets"),
        (GPU, replace(HOST, cgroup_limit_gib=16.0), {}, "allows 16.0 GiB of host memory, fewer than the 60.0 GiB"),
        (replace(GPU, can_pin=False), HOST, {}, "cuda:0: host memory cannot be pinned"),
        (replace(GPU, free_gib=30.0), HOST, {}, "cuda:0: only 30.0 of 80.0 GiB are free"),
        (Device("xpu:0", "xpu", "xpu", obstacle="lost"), HOST, {}, "xpu:0 could not be examined: lost"),
    ],
)
def test_each_problem_is_found_alone(
    device: Device, host: HostLimits, versions: Mapping[str, str | None], complaint: str
) -> None:
    (problem,) = find_problems([device], host, {**find_versions(), **versions})
    assert complaint in problem


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
    assert found.cgroup_limit_gib == (None if expected is None else expected / GIB)


@pytest.mark.parametrize(("limit", "expected"), [(resource.RLIM_INFINITY, None), (8 * 2**20, 8 / 1024)])
def test_the_locked_memory_limit(monkeypatch: pytest.MonkeyPatch, limit: int, expected: float | None) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert host_limits().locked_limit_gib == expected
    assert host_limits().total_gib == psutil.virtual_memory().total / GIB


@pytest.mark.parametrize("can_pin", [True, False])
def test_an_accelerator_is_measured(monkeypatch: pytest.MonkeyPatch, can_pin: bool) -> None:
    """With stand-ins for whatever a CPU lacks."""
    copiers: list[Copier] = []

    def make_copier(device: torch.device, pin_memory: bool) -> Copier:
        copiers.append(SyncCopier())
        return copiers[-1]

    def make_pinned(num_bytes: int, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(is_pinned=lambda: can_pin)

    monkeypatch.setattr(devices, "copier_for", make_copier)
    monkeypatch.setattr(devices, "clock_for", lambda device: HostClock())
    monkeypatch.setattr(devices, "pinned_empty", make_pinned)
    monkeypatch.setattr(devices, "counters_for", lambda device: FakeCounters())
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (3 * GIB, 4 * GIB))
    found = examine_device(torch.device("hpu:0"))
    assert (found.free_gib, found.total_gib, found.can_pin, found.has_counters) == (3, 4, can_pin, True)
    # What could not be pinned is not measured as if it were.
    assert (found.pinned is not None) == can_pin
    assert found.pageable is not None
    assert len(copiers) == 1 + can_pin
    assert all(copier.bytes_to_host == copier.bytes_to_device == 6 * 16 * 2**20 for copier in copiers)


def test_a_device_that_fails_becomes_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate a lot.")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", fail)
    device = examine_device(torch.device("cuda:1"))
    assert device.obstacle == "CUDA out of memory."
    (problem,) = find_problems([device], HOST, find_versions())
    assert problem == "cuda:1 could not be examined: CUDA out of memory."


@pytest.mark.parametrize("name", ["nonsense", "cpu:7", "vulkan"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"device='{name}' is no"):
        find_devices(name)


def test_the_page_names_everything() -> None:
    machine = Machine([GPU], HOST, find_versions(), find_features(GPU, None), ["something is wrong"])
    lines = [line.strip() for line in page(machine).splitlines()]
    assert "memory: 70.00 GiB free of 80.00 GiB" in lines
    assert "link, pinned host memory: 24.0 GB/s to the host, 25.0 GB/s to the device" in lines
    assert "link, pageable host memory: 5.0 GB/s to the host, 6.0 GB/s to the device" in lines
    assert "locked-memory limit (ulimit -l)  8 MiB" in lines
    assert lines[-2:] == ["Problems", "something is wrong"]
    without = Machine([CPU], HOST, {**find_versions(), "lerobot": None}, find_features(CPU, None), [])
    assert 'not installed: pip install "hf_memopt[lerobot]"' in page(without)
    assert page(without).endswith("Problems\n  none found")


def test_the_command_prints_a_page_or_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memopt.report.doctor.this_machine.host_limits", lambda: HOST)
    assert main(["doctor", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == page(examine("cpu")) + "\n"
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][0]["name"] == "cpu"
    assert found["versions"] == examine("cpu").versions
    assert {feature["status"] for feature in found["features"]} <= {"on", "off", "untried"}


def test_the_quiet_command_tells_problems_by_its_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = {**find_versions(), "datasets": "4"}
    monkeypatch.setattr("hf_memopt.report.doctor.this_machine.host_limits", lambda: HOST)
    monkeypatch.setattr("hf_memopt.report.doctor.this_machine.find_versions", lambda: sound)
    assert main(["doctor", "--device", "cpu", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    sound["datasets"] = None
    assert main(["doctor", "--device", "cpu", "--quiet"]) == 1
    assert capsys.readouterr().out == "datasets is not installed: pip install datasets\n"
    assert main(["doctor", "--device", "cpu"]) == 0
