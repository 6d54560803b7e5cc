"""What the doctor finds out about a machine, and what it makes of it."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from doctor_machines import GPU, HOST
from torch import Tensor

from hf_memopt.report.doctor.devices import Device, examine_device
from hf_memopt.report.doctor.host import HostLimits, find_versions
from hf_memopt.report.doctor.this_machine import find_problems

GIB = 2**30


def test_a_sound_machine_has_no_problems() -> None:
    assert find_problems([GPU], HOST, find_versions()) == []


@pytest.mark.parametrize(
    ("device", "host", "versions", "complaint"),
    [
        (GPU, HOST, {"datasets": None}, "datasets is not installed: pip install datasets"),
        (GPU, replace(HOST, cgroup_limit_gib=16.0), {}, "allows 16.0 GiB of host memory, less than the 60.0 GiB"),
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
