"""`hf-memopt doctor` and `report`: pages, JSON, exit status and refusals."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from doctor_machines import HOST
from refused import refused
from run_folders import HOLDERS, causal_lm_run, demo_run, logged_run, write_json

from hf_memopt.cli import main
from hf_memopt.report.doctor import examine, find_versions, page

Capture = pytest.CaptureFixture[str]


def test_the_command_prints_a_page_or_json(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memopt.report.doctor.host_limits", lambda: HOST)
    assert main(["doctor", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == page(examine("cpu")) + "\n"
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][0]["name"] == "cpu"
    assert found["versions"] == examine("cpu")["versions"]


def test_the_quiet_command_tells_problems_by_its_status(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = {**find_versions(), "datasets": "4"}
    monkeypatch.setattr("hf_memopt.report.doctor.host_limits", lambda: HOST)
    monkeypatch.setattr("hf_memopt.report.doctor.find_versions", lambda: sound)
    assert main(["doctor", "--device", "cpu", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    sound["datasets"] = None
    assert main(["doctor", "--device", "cpu", "--quiet"]) == 1
    assert capsys.readouterr().out == "datasets is not installed: pip install datasets\n"
    assert main(["doctor", "--device", "cpu"]) == 0


def test_configs_prints_the_folder_of_the_shipped_files(capsys: Capture) -> None:
    assert main(["configs"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert {"lgt.json", "accelerate"} <= {file.name for file in folder.iterdir()}


def test_doctor_for_a_policy_finds_the_teacher_on_the_host(toy_student: Path, tmp_path: Path, capsys: Capture) -> None:
    student = Path(shutil.copytree(toy_student, tmp_path / "student"))
    config = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps({**config, "teacher_offload": "swap"}))
    assert main(["doctor", "--policy", str(student), "--device", "cpu"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert f"Policy {student}: smolvla_reflow on cpu" in lines
    assert f"Checkpoint: {config['teacher_model_path']}" in lines
    assert "Device: cpu" in lines
    assert "Status: ✓ ON CPU (offloaded)" in lines


def test_doctor_for_a_policy_has_its_lines_in_json(toy_student: Path, capsys: Capture) -> None:
    assert main(["doctor", "--policy", str(toy_student), "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy"][0] == f"Policy {toy_student}: smolvla_reflow on cpu"
    assert found["devices"][0]["name"] == "cpu"


def test_doctor_for_a_policy_without_teacher_is_refused(toy_teacher: Path, capsys: Capture) -> None:
    assert "has no teacher: its policy is of type 'smolvla'" in refused(capsys, "doctor", "--policy", str(toy_teacher))


def test_an_empty_folder_is_refused_with_what_it_lacks(tmp_path: Path, capsys: Capture) -> None:
    assert main(["report", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    for word in (
        "holds nothing to report",
        "memory.jsonl",
        "trainer_state.json",
        "MemoryLoggingCallback",
        "results.json",
    ):
        assert word in message
    assert list(tmp_path.iterdir()) == []
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_without_matplotlib_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    demo_run(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(tmp_path)]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
    assert main(["report", str(tmp_path), "--json"]) == 0  # needs no figures


@pytest.mark.e2e
def test_the_command_writes_or_prints(tmp_path: Path, capsys: Capture) -> None:
    demo_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"report: {tmp_path / 'report' / 'report.html'}\n" in printed
    assert "not in the report: memory over time" in printed
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holders"] == HOLDERS
    assert main(["report", str(tmp_path), "--json", "--output", str(tmp_path / "elsewhere")]) == 2
    assert "not allowed with argument --json" in capsys.readouterr().err
    (tmp_path / "file").write_text("precious")
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "file")]) == 2
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.e2e
def test_runs_below_a_folder_are_found(tmp_path: Path, capsys: Capture) -> None:
    demo_run(tmp_path / "demo")
    causal_lm_run(tmp_path / "sweep" / "first")
    logged_run(tmp_path / "sweep" / "second")
    write_json(tmp_path / "other" / "results.json", {"rows": []})
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "pages")]) == 0
    printed = capsys.readouterr()
    for name in ("demo", "sweep/first", "sweep/second"):
        assert f"report: {tmp_path / 'pages' / name / 'report.html'}" in printed.out
    assert f"not reported: {tmp_path / 'other'} holds nothing to report" in printed.err
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)] == ["demo", "first", "second"]
    assert main(["report", str(tmp_path / "other")]) == 2
    assert main(["report", str(tmp_path / "sweep" / "first" / "..")]) == 0  # to the runs' own folders
    assert (tmp_path / "sweep" / "first" / "report" / "report.html").exists()
