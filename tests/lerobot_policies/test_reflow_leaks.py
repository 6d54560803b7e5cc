from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule

from hf_memopt import detect_leaks

measure = LateModule("hf_memopt.lerobot.evaluate.measure")
modeling_smolvla_reflow = LateModule("hf_memopt.lerobot.modeling_smolvla_reflow")
toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["resident", "swap"])
def test_reflow_training_leaks_nothing(offload: str, toy_teacher: Path, toy_student: Path, toy_dataset: Path) -> None:
    (batch,) = measure.held_out_batches(toy_teacher, toy.REPO_ID, toy_dataset, [3], batch_size=4, max_observations=4)
    policy = modeling_smolvla_reflow.SmolVLAReflowPolicy.from_pretrained(toy_student).train()
    policy.config.teacher_offload = offload
    optimizer = torch.optim.AdamW(parameter for parameter in policy.parameters() if parameter.requires_grad)

    def step() -> Any:
        loss, _ = policy.forward(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    leaks = detect_leaks(step, num_steps=36)
    assert policy.teacher.report().mode == offload
    assert not leaks.leaking, str(leaks)
