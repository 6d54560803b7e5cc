from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from late_imports import LateModule

from hf_memopt.weights import TeacherReport

diagnosis = LateModule("hf_memopt.lerobot.student.diagnosis")
prepare = LateModule("hf_memopt.lerobot.student.prepare")
modeling_smolvla_reflow = LateModule("hf_memopt.lerobot.modeling_smolvla_reflow")


@pytest.mark.parametrize("mode", ["swap", "stream"])
def test_diagnosis_of_an_offloaded_teacher(mode: str, toy_teacher: Path, tmp_path: Path) -> None:
    student = prepare.prepare_student(str(toy_teacher), tmp_path / "student", teacher_offload=mode)
    lines = diagnosis.diagnose(str(student), "cpu").splitlines()
    assert lines[1:4] == ["Teacher Model Device:", "  Device: cpu", "  Status: ✓ ON CPU (offloaded)"]
    assert f"  Mode: {mode}; {mode} was asked for" in lines
    assert "Shared prefix: on" in lines[-3]
    assert lines[-1] == "✓ All checks PASSED: student and teacher load, and the teacher's target is finite."
    (copied,) = [line for line in lines if line.startswith("  Copied for one target: ")]
    assert copied.endswith(" MiB to the device, 0.0 MiB back")
    assert not copied.startswith("  Copied for one target: 0.0")


def test_diagnosis_of_a_resident_teacher_without_shared_prefix(toy_teacher: Path, tmp_path: Path) -> None:
    student = prepare.prepare_student(str(toy_teacher), tmp_path / "student", share_prefix="off")
    text = diagnosis.diagnose(str(student), "cpu")
    assert "  Device: cpu\n  Status: ON CPU (not offloaded)\n  Mode: resident; it runs on the CPU" in text
    assert "Shared prefix: off; share_prefix=off was asked for" in text


@pytest.mark.parametrize(
    ("mode", "home", "host_bytes", "status"),
    [
        ("resident", "cuda:0", 0, "ON CUDA:0 (not offloaded)"),
        ("swap", "cpu", 8, "✓ ON CPU (offloaded)"),
        ("stream", "cpu", 8, "✓ ON CPU (offloaded)"),  # what auto begins with on CUDA
    ],
)
def test_the_status_on_an_accelerator_is_where_the_weights_are(
    mode: str, home: str, host_bytes: int, status: str
) -> None:
    report = TeacherReport(mode, "why", home, "cuda:0", host_bytes, 8 - host_bytes, 8, 8, 8, 0, 0.0)
    student = SimpleNamespace(config=SimpleNamespace(teacher_model_path="you/teacher"))
    lines = diagnosis.teacher_lines(student, report)
    assert lines[:4] == ["Teacher Model Device:", f"  Device: {home}", f"  Status: {status}", f"  Mode: {mode}; why"]


def test_a_student_that_teaches_itself_has_a_verdict_too(toy_teacher: Path, tmp_path: Path) -> None:
    student = prepare.prepare_student(
        str(toy_teacher), tmp_path / "student", reflow_target="self", reflow_real_data=0.5
    )
    text = diagnosis.diagnose(str(student), "cpu")
    assert "Teacher Model: none\n  Targets: of the student itself" in text
    assert text.endswith("✓ All checks PASSED: the student loads, and its own target is finite.")


def test_no_verdict_for_a_target_that_is_not_finite(toy_student: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, target = modeling_smolvla_reflow.SmolVLAReflowPolicy, torch.tensor([1.0, float("nan")])
    monkeypatch.setattr(policy, "generate_reflow_target", lambda *_, **__: target)
    with pytest.raises(ValueError, match="makes a target that is not finite; take another checkpoint"):
        diagnosis.diagnose(str(toy_student), "cpu")


def test_diagnosis_needs_a_teacher(toy_teacher: Path) -> None:
    with pytest.raises(ValueError, match="has no teacher: its policy is of type 'smolvla' without use_reflow=true"):
        diagnosis.diagnose(str(toy_teacher))
