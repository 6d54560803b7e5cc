"""A card says how a student was made and how good it is, measured or not, and nothing about its owner's folders."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def heavy_imports() -> None:
    """Import these when the first test runs: collecting tests must not cost their seconds."""
    global measure, Observations, toy, write_card
    from hf_memopt.integrations.lerobot.student.model_card import Observations, measure, write_card
    from hf_memopt.recipes.reflow import smolvla_toy as toy


@pytest.mark.usefixtures("quick_evaluation")
def test_the_card_holds_what_was_measured(toy_student: Path, toy_dataset: Path) -> None:
    measured = measure(str(toy_student), Observations(toy.REPO_ID, toy_dataset, [3], held_out=True))
    card = write_card(str(toy_student), 1, measured)
    for steps in (1, 2, 4, 10):
        error = measured[0].student.error[steps]
        assert f"| {steps} | {error:.4f} | {error:.4f} |" in card  # untrained: still its teacher
    assert "1 episode of `local/reach_past_obstacle`, held out from training" in card
    assert "one Euler step" in card
    assert "library_name: lerobot" in card
    assert str(toy_student.parent) not in card


def test_a_card_without_measurement_says_so(toy_student: Path) -> None:
    assert "Not measured." in write_card(str(toy_student), 2, None)
    assert "2 Euler steps" in write_card(str(toy_student), 2, None)


def test_an_untrained_student_has_no_training_data_to_measure_on(toy_student: Path) -> None:
    with pytest.raises(ValueError, match=r"no train_config.json.*--dataset-repo-id"):
        measure(str(toy_student))


def test_a_policy_without_a_teacher_cannot_be_compared(toy_teacher: Path) -> None:
    with pytest.raises(ValueError, match="--no-evaluation"):
        measure(str(toy_teacher))
