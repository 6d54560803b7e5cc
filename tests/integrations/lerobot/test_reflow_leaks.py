"""A reflow training that swaps its teacher keeps nothing from step to step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_memopt import detect_leaks


@pytest.fixture(scope="module", autouse=True)
def heavy_imports() -> None:
    """Import these when the first test runs: collecting tests must not cost their seconds."""
    global held_out_batches, SmolVLAReflowPolicy, toy
    from hf_memopt.integrations.lerobot.evaluate.measure import held_out_batches
    from hf_memopt.integrations.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
    from hf_memopt.recipes.reflow import smolvla_toy as toy


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["resident", "swap"])
def test_reflow_training_leaks_nothing(offload: str, toy_teacher: Path, toy_student: Path, toy_dataset: Path) -> None:
    (batch,) = held_out_batches(toy_teacher, toy.REPO_ID, toy_dataset, [3], batch_size=4, max_observations=4)
    policy = SmolVLAReflowPolicy.from_pretrained(toy_student).train()
    policy.config.teacher_offload = offload
    optimizer = torch.optim.AdamW(parameter for parameter in policy.parameters() if parameter.requires_grad)

    def step() -> Any:
        loss, _ = policy.forward(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    leaks = detect_leaks(step, num_steps=36)
    assert policy.teacher_report().mode == offload
    assert not leaks.leaking, str(leaks)
