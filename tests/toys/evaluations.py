"""Evaluations of a student and its teacher, without models."""

from typing import Any

from hf_memopt.lerobot.evaluate.measure import ModelEvaluation


def side(error: float, latency_ms: float) -> Any:
    """Return one model's figures for 1, 2 and 10 steps: the error falls with their number, the time rises."""
    steps = (1, 2, 10)
    return ModelEvaluation(
        error={k: error / k for k in steps},
        action_error=dict.fromkeys(steps, 1.0),
        straightness=2.0,
        normalized_straightness=error / 10,
        spread=dict.fromkeys(steps, 0.25),
        latency_ms={k: latency_ms * k for k in steps},
        weights_bytes=4096,
        sampling_bytes=512,
    )
