from typing import Any

import pytest
from late_imports import LateModule

evaluation_table = LateModule("hf_memopt.lerobot.evaluate.measure")
evaluations = LateModule("evaluations")
measure = LateModule("hf_memopt.lerobot.evaluate.measure")
rollouts = LateModule("hf_memopt.lerobot.evaluate.rollouts")


@pytest.fixture
def evaluation() -> Any:
    return measure.ReflowEvaluation(
        48, 10, "CPU", teacher=evaluations.side(0.5, 20.0), student=evaluations.side(0.1, 21.0)
    )


def test_the_table_has_a_row_for_each_number_of_steps(evaluation: Any) -> None:
    lines = evaluation_table.table(evaluation).splitlines()
    assert lines[0].split("  ")[0].strip() == "steps"
    assert lines[1].split() == ["1", "0.5000", "0.1000", "0.2500", "0.2500", "20.0", "21.0"]
    assert lines[3].split() == ["10", "0.0500", "0.0100", "0.2500", "0.2500", "200.0", "210.0"]
    assert "teacher 0.0500, student 0.0100" in evaluation_table.table(evaluation)
    results = {steps: rollouts.RolloutResult(10, 0.7, 2.5) for steps in (1, 2, 10)}
    assert evaluation_table.table(evaluation, results).splitlines()[1].split()[-2:] == ["70%", "2.500"]
