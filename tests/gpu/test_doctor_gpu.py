"""`hf-memopt doctor` on a GPU."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_cuda import device as fake_device

from hf_memopt.cli import main
from hf_memopt.report.doctor import examine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Capture = pytest.CaptureFixture[str]
GIB = 2**30

only_fake = pytest.mark.skipif(not fake_device.is_loaded(), reason="needs a device that fails when it is told to")


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    """Free earlier tests' memory in torch's cache."""
    torch.cuda.empty_cache()
    yield
    if fake_device.is_loaded():
        fake_device.give_back()


@pytest.fixture(autouse=True)
def sound_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the host's limits, so that all problems are the device's."""
    monkeypatch.setattr("hf_memopt.report.doctor.cgroup_limits", lambda cgroups, membership: [])


def test_the_page_has_each_device(capsys: Capture) -> None:
    free_gib = [torch.cuda.mem_get_info(index)[0] / GIB for index in range(torch.cuda.device_count())]
    assert main(["doctor"]) == 0
    sections = dict(section.split("\n", 1) for section in capsys.readouterr().out.split("\n\n"))
    lines = [line.strip() for line in sections["Devices"].splitlines()]
    for index, free in enumerate(free_gib):
        place = lines.index(f"cuda:{index}: {torch.cuda.get_device_name(index)}")
        total = torch.cuda.mem_get_info(index)[1] / GIB
        assert lines[place + 1] == f"memory: {free:.2f} GiB free of {total:.2f} GiB"
        for line, title in zip(lines[place + 2 : place + 4], ("pinned", "pageable"), strict=True):
            assert line.startswith(f"link, {title} host memory: ")
            assert line.endswith(" GB/s to the device")


def test_one_device_and_one_that_is_not_there(capsys: Capture) -> None:
    last = f"cuda:{torch.cuda.device_count() - 1}"
    assert main(["doctor", "--device", last, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(device["name"], device["kind"], device["can_pin"]) for device in found["devices"]] == [
        (last, "cuda", True)
    ]
    assert main(["doctor", "--device", f"cuda:{torch.cuda.device_count()}"]) == 2
    assert "is not there; this machine has cuda:0, " in capsys.readouterr().err


TEACHER_MODES = {
    "resident": "resident; resident was asked for",
    "swap": "swap; swap was asked for",
    "stream": "stream; stream was asked for",
    "auto": "stream; it streams until two optimizer steps have been measured",
}


@pytest.mark.parametrize("mode", TEACHER_MODES)
def test_the_teacher_is_where_it_says(mode: str, toy_student: Path, tmp_path: Path, capsys: Capture) -> None:
    student = Path(shutil.copytree(toy_student, tmp_path / "student"))
    config = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps({**config, "teacher_offload": mode}))
    assert main(["doctor", "--policy", str(student)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert f"Policy {student}: smolvla_reflow on cuda" in lines
    told = dict(line.split(": ", maxsplit=1) for line in lines if line.startswith(("Device: ", "Status: ", "Mode: ")))
    resident = mode == "resident"
    assert told["Device"] == ("cuda:0" if resident else "cpu")
    assert told["Status"] == ("ON CUDA:0 (not offloaded)" if resident else "✓ ON CPU (offloaded)")
    assert told["Mode"] == TEACHER_MODES[mode]
    assert lines[-1].startswith("✓ All checks PASSED: ")
    (weights,) = [line for line in lines if line.startswith("Own weights: ")]
    on_device = "0.7" if resident else "0.0"
    assert weights == f"Own weights: 0.7 MiB, of which {on_device} MiB on the device between targets"


def problems(capsys: Capture) -> list[str]:
    """Return the lines of `--quiet`; the exit status is 1 if there are any."""
    status = main(["doctor", "--quiet", "--device", "cuda:0"])
    lines = capsys.readouterr().out.splitlines()
    assert status == bool(lines)
    return lines


@only_fake
def test_a_sound_device_has_no_problems(capsys: Capture) -> None:
    assert problems(capsys) == []


@only_fake
def test_the_speed_of_a_link_is_measured(capsys: Capture) -> None:
    with fake_device.settings(bytes_per_s_to_host=4e8, bytes_per_s_to_device=2e8, seed=-1):
        assert main(["doctor", "--json", "--device", "cuda:0"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["devices"]
    # A busy machine is slower than its link, never faster.
    assert 0.04 < found["pinned"]["to_host_gb_per_s"] <= 0.4
    assert 0.02 < found["pinned"]["to_device_gb_per_s"] <= 0.2


@only_fake
def test_a_device_that_others_use_is_a_problem(capsys: Capture) -> None:
    fake_device.leave_free(GIB)
    assert problems(capsys) == ["cuda:0: only 1.0 of 4.0 GiB are free: end the processes that hold the rest"]


@only_fake
def test_a_full_device_is_a_problem(capsys: Capture) -> None:
    fake_device.leave_free(2**20)
    (problem,) = problems(capsys)
    assert problem.startswith("cuda:0 could not be examined: CUDA out of memory. Tried to allocate 16.00 MiB")


@only_fake
def test_memory_that_cannot_be_pinned_is_a_problem(capsys: Capture) -> None:
    fake_device.fail("host_register", times=1000)
    (problem,) = problems(capsys)
    assert problem.startswith("cuda:0: host memory cannot be pinned, so copies are slow")


def test_a_gpu_is_examined() -> None:
    machine = examine("cuda:0")
    (gpu,) = machine["devices"]
    assert gpu["obstacle"] is None
    assert gpu["model"] == torch.cuda.get_device_name(0)
    assert 0 < gpu["free_gib"] <= gpu["total_gib"]
    assert gpu["can_pin"]
    assert min(gpu["pinned"]["to_host_gb_per_s"], gpu["pageable"]["to_host_gb_per_s"]) > 0.1
