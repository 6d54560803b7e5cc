"""What optimizers keep and take."""

import pytest
from transformers_toys import estimate

from hf_memopt.estimate import MemoryEstimate


@pytest.mark.slow
def test_optimizers_differ_in_their_state(qwen3: str, plain: MemoryEstimate) -> None:
    weights = plain.breakdown["parameters"]
    assert 2 * weights < plain.breakdown["optimizer state"] < 2.2 * weights
    assert "optimizer state" not in estimate(qwen3, optimizer="sgd").breakdown
    assert estimate(qwen3, optimizer="adafactor").breakdown["optimizer state"] < weights / 4
    foreach = estimate(qwen3, optimizer="adamw-foreach")
    workspaces = plain.breakdown["library workspaces"]
    assert foreach.phases["optimizer"] - workspaces > 5 * weights > plain.phases["optimizer"] - workspaces
