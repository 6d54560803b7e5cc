"""The doctor's page: every finding in its section, and what is not known is left out or called so."""

from dataclasses import replace

import pytest
from doctor_machines import CPU, GPU, HOST

from hf_memopt.report.doctor import Machine, page
from hf_memopt.report.doctor.devices import Device
from hf_memopt.report.doctor.features import find_features
from hf_memopt.report.doctor.host import HostLimits, find_versions


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


def section(text: str, title: str) -> list[str]:
    """Its lines, without the indentation that all of them have."""
    blocks = {lines[0]: lines[1:] for lines in (block.splitlines() for block in text.split("\n\n"))}
    assert all(line.startswith("  ") for line in blocks[title])
    return [line[2:] for line in blocks[title]]


def page_of(*devices: Device, host: HostLimits = HOST) -> str:
    versions = {"torch": "2.11", "datasets": None}
    return page(Machine(list(devices), host, versions, find_features(devices[0], None), ["a", "b"]))


def test_sections_are_in_order_and_features_are_the_first_devices() -> None:
    titles = [block.splitlines()[0] for block in page_of(GPU, CPU).split("\n\n")]
    assert titles == ["Devices", "Host", "Versions", "Features on cuda:0", "Problems"]
    assert section(page_of(GPU), "Problems") == ["a", "b"]


def test_each_device_says_what_is_known_of_it() -> None:
    lost = Device("xpu:0", "xpu", "Other GPU", obstacle="lost")
    unpinned = replace(GPU, name="cuda:1", pinned=None, free_gib=None)
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
    found = section(page_of(CPU, host=replace(HOST, **limits)), "Host")
    assert found[0].split() == ["memory", "60.00", "GiB", "available", "of", "64.00", "GiB"]
    assert [" ".join(line.split()) for line in found[1:3]] == [" ".join(line.split()) for line in lines]
    assert found[3].split()[-1] == "8"


def test_a_package_that_is_no_extra_has_no_remedy_of_ours() -> None:
    assert section(page_of(CPU), "Versions") == ["torch     2.11", "datasets  none"]
