"""Tests that figures of `evaluate` come back from their file as they were, and for the measured weights alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule

evaluation_file = LateModule("hf_memopt.lerobot.student.model_card")
evaluations = LateModule("evaluations")
measure = LateModule("hf_memopt.lerobot.evaluate.measure")
model_card = LateModule("hf_memopt.lerobot.student.model_card")
rollouts = LateModule("hf_memopt.lerobot.evaluate.rollouts")


@pytest.fixture
def measured() -> Any:
    evaluation = measure.ReflowEvaluation(
        48, 10, "CPU", teacher=evaluations.side(0.5, 3.1), student=evaluations.side(0.1, 6.2)
    )
    return evaluation, model_card.Observations("you/data", Path("/data"), [3, 4], held_out=True)


@pytest.mark.parametrize("root", [None, Path("/data")])
def test_what_was_written_is_read(measured: Any, root: Path | None, toy_student: Path, tmp_path: Path) -> None:
    evaluation = measured[0].with_success(teacher={1: 0.25, 10: 0.75})
    observations = model_card.Observations("you/data", root, None, held_out=False)
    written = evaluation_file.write_evaluation(tmp_path / "new", str(toy_student), (evaluation, observations))
    assert written == [tmp_path / "new" / name for name in ("evaluation.json", "evaluation.png")]
    assert written[1].read_bytes().startswith(b"\x89PNG")
    assert evaluation_file.read_evaluation(tmp_path / "new", str(toy_student)) == (evaluation, observations)


def test_older_files_are_replaced_and_no_environment_is_made_up(
    measured: Any, toy_student: Path, tmp_path: Path
) -> None:
    for name in ("evaluation.json", "evaluation.png"):
        (tmp_path / name).write_text("older")
    result = {1: rollouts.RolloutResult(10, 0.7, 2.5)}
    for results, environment in (
        (result, {"1": {"num_episodes": 10, "success_rate": 0.7, "mean_reward": 2.5}}),
        (None, None),
    ):
        numbers, _ = evaluation_file.write_evaluation(tmp_path, str(toy_student), measured, results)
        assert json.loads(numbers.read_text()).get("environment") == environment
    assert len(list(tmp_path.iterdir())) == 2


def test_the_figures_of_other_weights_are_refused(measured: Any, toy_student: Path, tmp_path: Path) -> None:
    trained = Path(shutil.copytree(toy_student, tmp_path / "trained"))
    evaluation_file.write_evaluation(tmp_path, str(trained), measured)
    with (trained / "model.safetensors").open("ab") as weights:
        weights.write(b"more")
    with pytest.raises(ValueError, match=r"evaluation='.*' was measured with other weights than .*; run `evaluate`"):
        evaluation_file.read_evaluation(tmp_path, str(trained))


@pytest.mark.parametrize("lost", ["observations", "teacher", "num_observations"])
def test_a_file_that_lacks_figures_is_named(lost: str, measured: Any, toy_student: Path, tmp_path: Path) -> None:
    numbers, _ = evaluation_file.write_evaluation(tmp_path, str(toy_student), measured)
    found = json.loads(numbers.read_text())
    numbers.write_text(json.dumps({name: value for name, value in found.items() if name != lost}))
    with pytest.raises(ValueError, match=rf"evaluation.json is not what `hf-memopt evaluate` writes .*{lost}.*run it"):
        evaluation_file.read_evaluation(tmp_path, str(toy_student))


def test_outcomes_are_the_teachers_own_steps_and_the_students(measured: Any) -> None:
    evaluation = measured[0].with_success(teacher={10: 0.75}, student={1: 0.5})
    found = {
        name: (each.num_steps, each.success_rate, each.latency_ms) for name, each in evaluation.outcomes(1).items()
    }
    assert found == {"teacher": (10, 0.75, 31.0), "student": (1, 0.5, 6.2)}


def test_the_card_begins_with_the_outcome_and_has_a_column_for_success(measured: Any, toy_student: Path) -> None:
    evaluation, observations = measured
    plain = model_card.write_card(str(toy_student), 1, (evaluation, observations))
    assert "**teacher: 10 steps, 31 ms; student: 1 step, 6 ms**" in plain
    assert "| Euler steps | error, teacher | error, student | ms, teacher | ms, student |\n" in plain
    rates = {1: 0.5, 2: 0.6, 10: 0.75}
    tried = evaluation.with_success(teacher=rates, student=rates)
    card = model_card.write_card(str(toy_student), 1, (tried, observations))
    assert "**teacher: 75 % in 10 steps, 31 ms; student: 50 % in 1 step, 6 ms**, for one action chunk." in card
    assert "| ms, student | success, teacher | success, student |\n" in card
    assert "| 2 | 0.2500 | 0.0500 | 6.2 | 12.4 | 60% | 60% |\n" in card


def test_the_card_makes_up_no_outcome_of_steps_that_were_not_measured(measured: Any, toy_student: Path) -> None:
    card = model_card.write_card(str(toy_student), 3, measured)
    assert "3 Euler steps" in card
    assert "for one action chunk" not in card
