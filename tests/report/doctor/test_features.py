from dataclasses import replace

import pytest
from doctor_machines import CPU, GPU, statuses

from hf_memopt.report.doctor.devices import Device
from hf_memopt.report.doctor.features import find_features, obstacle_to_compile


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
