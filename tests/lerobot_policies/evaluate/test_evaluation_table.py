from typing import Any

import pytest
from late_imports import LateModule

evaluation_table = LateModule("hf_memopt.lerobot.evaluate.evaluation_table")
measure = LateModule("hf_memopt.lerobot.evaluate.measure")
rollouts = LateModule("hf_memopt.lerobot.evaluate.rollouts")


def side(error: float, latency_ms: float) -> Any:
    steps = (1, 2, 10)
    return measure.ModelEvaluation(
        error={k: error / k for k in steps},
        action_error=dict.fromkeys(steps, 1.0),
        straightness=2.0,
        normalized_straightness=error / 10,
        spread=dict.fromkeys(steps, 0.25),
        latency_ms={k: latency_ms * k for k in steps},
        weights_bytes=4096,
        sampling_bytes=512,
    )


@pytest.fixture
def evaluation() -> Any:
    return measure.ReflowEvaluation(48, 10, "CPU", teacher=side(0.5, 20.0), student=side(0.1, 21.0))


def test_the_table_has_a_row_for_each_number_of_steps(evaluation: Any) -> None:
    lines = evaluation_table.table(evaluation).splitlines()
    assert lines[0].split("  ")[0].strip() == "steps"
    assert lines[1].split() == ["1", "0.5000", "0.1000", "0.2500", "0.2500", "20.0", "21.0"]
    assert lines[3].split() == ["10", "0.0500", "0.0100", "0.2500", "0.2500", "200.0", "210.0"]
    assert "teacher 0.0500, student 0.0100" in evaluation_table.table(evaluation)
    results = {steps: rollouts.RolloutResult(10, 0.7, 2.5) for steps in (1, 2, 10)}
    assert evaluation_table.table(evaluation, results).splitlines()[1].split()[-2:] == ["70%", "2.500"]
