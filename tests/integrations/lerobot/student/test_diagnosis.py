"""`hf-memopt doctor --policy` says where the teacher is."""

from pathlib import Path

import pytest
from late_imports import LateModule

diagnosis = LateModule("hf_memopt.integrations.lerobot.student.diagnosis")
prepare = LateModule("hf_memopt.integrations.lerobot.student.prepare")


@pytest.mark.parametrize(("mode", "why"), [("swap", ""), ("stream", ": stream was asked for")])
def test_diagnosis_of_an_offloaded_teacher(mode: str, why: str, toy_teacher: Path, tmp_path: Path) -> None:
    student = prepare.prepare_student(str(toy_teacher), tmp_path / "student", teacher_offload=mode)
    text = diagnosis.diagnose(str(student), "cpu")
    assert "Device: cpu\n" in text
    assert f"Status: ✓ ON CPU (offloaded{why})" in text
    assert "Shared prefix: on" in text


def test_diagnosis_of_a_resident_teacher_without_shared_prefix(toy_teacher: Path, tmp_path: Path) -> None:
    student = prepare.prepare_student(str(toy_teacher), tmp_path / "student", share_prefix="off")
    text = diagnosis.diagnose(str(student), "cpu")
    assert "✓ ON CPU (not offloaded: it runs on the CPU" in text
    assert "Shared prefix: off; share_prefix=off was asked for" in text


def test_diagnosis_needs_a_teacher(toy_teacher: Path) -> None:
    with pytest.raises(ValueError, match="has no teacher: its policy is of type 'smolvla' without use_reflow=true"):
        diagnosis.diagnose(str(toy_teacher))
