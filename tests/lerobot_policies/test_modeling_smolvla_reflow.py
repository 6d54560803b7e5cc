from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from late_imports import LateModule
from safetensors.torch import load_file
from torch import Tensor

modeling_smolvla_reflow = LateModule("hf_memopt.lerobot.modeling_smolvla_reflow")
modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")
reflow_students = LateModule("reflow_students")


Make = Callable[..., Any]


def test_pi_aloha_conditions_both_models_on_the_converted_state(make: Make, batch: Any, noise: Tensor) -> None:
    batch["observation.state"] = batch["observation.state"].abs() * 0.01 + 0.03
    policy = make(architecture={"adapt_to_pi_aloha": True}, share_prefix="off")
    teacher = modeling_smolvla.SmolVLAPolicy.from_pretrained(policy.config.teacher_model_path, strict=True)
    copied = {key: value.clone() for key, value in batch.items()}
    want = teacher.predict_action_chunk(copied, noise=noise)
    got = policy._pi_aloha_encode_actions(
        reflow_students.target(policy, batch, noise)[..., : reflow_students.STATE_DIM]
    )
    assert torch.equal(got, want)


def test_checkpoints_hold_the_students_keys_and_inference_needs_no_teacher(
    make: Make, batch: Any, noise: Tensor, tmp_path: Path
) -> None:
    policy = make()
    policy(batch)
    policy.save_pretrained(tmp_path / "student")
    teacher_keys = set(load_file(Path(policy.config.teacher_model_path) / "model.safetensors"))
    assert set(load_file(tmp_path / "student" / "model.safetensors")) == teacher_keys
    policy.config.teacher_model_path = str(tmp_path / "gone")
    policy.save_pretrained(tmp_path / "orphan")
    orphan = modeling_smolvla_reflow.SmolVLAReflowPolicy.from_pretrained(tmp_path / "orphan")
    want = policy.predict_action_chunk(dict(batch), noise=noise)
    assert torch.equal(orphan.predict_action_chunk(dict(batch), noise=noise), want)
    with pytest.raises(ValueError, match=r"gone.*neither a checkpoint folder nor a hub id"):
        orphan(batch)
