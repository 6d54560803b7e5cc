"""Tests that a card has a student's origin and quality, and nothing about its owner's folders."""

import shutil
from pathlib import Path

import pytest
from late_imports import LateModule

from hf_memopt.memory.logger import METRICS_FILE, append_metrics
from hf_memopt.units import format_bytes

model_card = LateModule("hf_memopt.lerobot.student.model_card")
toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")


@pytest.mark.usefixtures("quick_evaluation")
def test_the_card_holds_what_was_measured(toy_student: Path, toy_dataset: Path) -> None:
    measured = model_card.measure(
        str(toy_student), model_card.Observations(toy.REPO_ID, toy_dataset, [3], held_out=True)
    )
    card = model_card.write_card(str(toy_student), 1, measured)
    found = measured[0]
    for steps in (1, 2, 4, 10):
        error = found.student.error[steps]
        times = f"{found.teacher.latency_ms[steps]:.1f} | {found.student.latency_ms[steps]:.1f}"
        assert f"| {steps} | {error:.4f} | {error:.4f} | {times} |" in card  # untrained: still its teacher
    assert f"weights {format_bytes(found.student.weights_bytes)}" in card
    assert f"at most {format_bytes(found.student.sampling_bytes)} of other tensors" in card
    assert "(CPU " in card
    assert "1 episode of `local/reach_past_obstacle`, held out from training" in card
    assert "one Euler step" in card
    assert "library_name: lerobot" in card
    assert str(toy_student.parent) not in card


def test_the_card_tells_what_the_run_logged_of_memory(toy_student: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "000040" / "pretrained_model"
    shutil.copytree(toy_student, checkpoint)
    assert "peak memory" not in model_card.write_card(str(checkpoint), 1, None)
    for step, gib in ((10, 2.5), (20, 3.25), (30, 3.0)):
        append_metrics(tmp_path / "run" / METRICS_FILE, step, {"memory/host_rss_gib": gib})
    assert "| peak memory | 3.25 GiB of the process |" in model_card.write_card(str(checkpoint), 1, None)
    append_metrics(tmp_path / "run" / METRICS_FILE, 40, {"memory/peak_allocated_gib": 1.5, "memory/host_rss_gib": 9.0})
    assert "| peak memory | 1.50 GiB of the device |" in model_card.write_card(str(checkpoint), 1, None)


def test_a_card_without_measurement_says_so(toy_student: Path) -> None:
    assert "Not measured." in model_card.write_card(str(toy_student), 2, None)
    assert "2 Euler steps" in model_card.write_card(str(toy_student), 2, None)


def test_an_untrained_student_has_no_training_data_to_measure_on(toy_student: Path) -> None:
    with pytest.raises(ValueError, match=r"no train_config.json.*--dataset-repo-id"):
        model_card.measure(str(toy_student))


def test_a_policy_without_a_teacher_cannot_be_compared(toy_teacher: Path) -> None:
    with pytest.raises(ValueError, match="--no-evaluation"):
        model_card.measure(str(toy_teacher))
