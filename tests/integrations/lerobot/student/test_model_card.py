"""A card says how a student was made and how good it is, measured or not, and nothing about its owner's folders."""

from pathlib import Path

import pytest
from late_imports import LateModule

model_card = LateModule("hf_memopt.integrations.lerobot.student.model_card")
toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")


@pytest.mark.usefixtures("quick_evaluation")
def test_the_card_holds_what_was_measured(toy_student: Path, toy_dataset: Path) -> None:
    measured = model_card.measure(
        str(toy_student), model_card.Observations(toy.REPO_ID, toy_dataset, [3], held_out=True)
    )
    card = model_card.write_card(str(toy_student), 1, measured)
    for steps in (1, 2, 4, 10):
        error = measured[0].student.error[steps]
        assert f"| {steps} | {error:.4f} | {error:.4f} |" in card  # untrained: still its teacher
    assert "1 episode of `local/reach_past_obstacle`, held out from training" in card
    assert "one Euler step" in card
    assert "library_name: lerobot" in card
    assert str(toy_student.parent) not in card


def test_a_card_without_measurement_says_so(toy_student: Path) -> None:
    assert "Not measured." in model_card.write_card(str(toy_student), 2, None)
    assert "2 Euler steps" in model_card.write_card(str(toy_student), 2, None)


def test_an_untrained_student_has_no_training_data_to_measure_on(toy_student: Path) -> None:
    with pytest.raises(ValueError, match=r"no train_config.json.*--dataset-repo-id"):
        model_card.measure(str(toy_student))


def test_a_policy_without_a_teacher_cannot_be_compared(toy_teacher: Path) -> None:
    with pytest.raises(ValueError, match="--no-evaluation"):
        model_card.measure(str(toy_teacher))
