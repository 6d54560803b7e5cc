"""What the doctor finds out about a machine, and what it makes of it."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from doctor_machines import CPU, GPU, HOST
from torch import Tensor

from hf_memopt.cli import main
from hf_memopt.report.doctor import Machine, examine, page
from hf_memopt.report.doctor.devices import Device, examine_device
from hf_memopt.report.doctor.features import find_features
from hf_memopt.report.doctor.host import HostLimits, find_versions
from hf_memopt.report.doctor.this_machine import find_problems

GIB = 2**30


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


def test_a_device_that_fails_becomes_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate a lot.")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", fail)
    device = examine_device(torch.device("cuda:1"))
    assert device.obstacle == "CUDA out of memory."
    (problem,) = find_problems([device], HOST, find_versions())
    assert problem == "cuda:1 could not be examined: CUDA out of memory."


def test_the_page_names_everything() -> None:
    machine = Machine([GPU], HOST, find_versions(), find_features(GPU, None), ["something is wrong"])
    lines = [line.strip() for line in page(machine).splitlines()]
    assert "memory: 70.00 GiB free of 80.00 GiB" in lines
    assert "link, pinned host memory: 24.0 GB/s to the host, 25.0 GB/s to the device" in lines
    assert "link, pageable host memory: 5.0 GB/s to the host, 6.0 GB/s to the device" in lines
    assert "locked-memory limit (ulimit -l)  8 MiB" in lines
    assert lines[-2:] == ["Problems", "something is wrong"]
    without = Machine([CPU], HOST, {**find_versions(), "lerobot": None}, find_features(CPU, None), [])
    assert "not installed: pip install '.[lerobot]' in hf_memopt's repository" in page(without)
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
