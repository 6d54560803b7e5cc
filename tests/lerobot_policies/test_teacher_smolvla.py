"""Tests that SmolVLA's streamed teacher is bitwise right for any number of steps, and small at published size."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adversarial_copier import AdversarialCopier
from late_imports import LateModule
from torch import Tensor

from hf_memopt.weights import OffloadedTeacher

configuration_smolvla_reflow = LateModule("hf_memopt.lerobot.configuration_smolvla_reflow")
modeling_smolvla_reflow = LateModule("hf_memopt.lerobot.modeling_smolvla_reflow")
flow_policy = LateModule("hf_memopt.lerobot.flow.flow_policy")
smolvla_toy = LateModule("hf_memopt.recipes.reflow.smolvla_toy")
configs = LateModule("lerobot.configs")
configuration_smolvla = LateModule("lerobot.policies.smolvla.configuration_smolvla")
modeling_smolvla = LateModule("lerobot.policies.smolvla.modeling_smolvla")


STATE_DIM = 6
NUM_CAMERAS = 3


def settings(vlm: Path, image_size: int, **changes: Any) -> dict[str, Any]:
    cameras = {
        f"observation.images.camera{index}": configs.PolicyFeature(
            configs.FeatureType.VISUAL, (3, image_size, image_size)
        )
        for index in range(NUM_CAMERAS)
    }
    return {
        "vlm_model_name": str(vlm),
        "load_vlm_weights": False,
        "device": "cpu",
        "input_features": {
            "observation.state": configs.PolicyFeature(configs.FeatureType.STATE, (STATE_DIM,)),
            **cameras,
        },
        "output_features": {"action": configs.PolicyFeature(configs.FeatureType.ACTION, (STATE_DIM,))},
        **changes,
    }


def observation(config: configuration_smolvla.SmolVLAConfig, batch_size: int) -> tuple[flow_policy.Observation, Tensor]:
    generator = torch.Generator().manual_seed(1)
    height, width = config.resize_imgs_with_padding
    masks = torch.ones(batch_size, dtype=torch.bool)
    return flow_policy.Observation(
        [torch.rand(batch_size, 3, height, width, generator=generator) for _ in range(NUM_CAMERAS)],
        [masks] * NUM_CAMERAS,
        torch.randint(7, 250, (batch_size, 5), generator=generator),
        torch.ones(batch_size, 5, dtype=torch.bool),
        torch.randn(batch_size, config.max_state_dim, generator=generator),
    ), torch.randn(batch_size, config.chunk_size, config.max_action_dim, generator=generator)


@pytest.fixture
def toy(toy_vlm: Path) -> dict[str, Any]:
    return settings(toy_vlm, 32, **smolvla_toy.POLICY_SETTINGS)


def test_streaming_is_bitwise_resident_for_any_number_of_steps(toy: dict[str, Any]) -> None:
    torch.manual_seed(0)
    policy = modeling_smolvla.SmolVLAPolicy(configuration_smolvla.SmolVLAConfig(**toy)).eval()
    reference = copy.deepcopy(policy)
    copier = AdversarialCopier("random")
    teacher = OffloadedTeacher(policy.model, device="cpu", mode="stream", copier=copier)
    seen, noise = observation(policy.config, batch_size=2)
    for num_steps in (3, *range(1, 11)):
        for each in (policy, reference):
            each.model.config.num_steps = num_steps
        with teacher.onload() as model, torch.no_grad():
            got = model.sample_actions(*seen.arguments(), noise=noise)
            assert torch.equal(got, reference.model.sample_actions(*seen.arguments(), noise=noise))
        assert copier.live_bytes == 0
    report = teacher.report()
    assert report.peak_device_bytes <= 1.05 * report.predicted_device_bytes


@pytest.mark.parametrize("share_prefix", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_a_student_gets_the_same_targets_from_a_streamed_teacher(
    toy: dict[str, Any], tmp_path: Path, share_prefix: str
) -> None:
    torch.manual_seed(0)
    modeling_smolvla.SmolVLAPolicy(configuration_smolvla.SmolVLAConfig(**toy)).save_pretrained(tmp_path / "teacher")
    flags = {"use_reflow": True, "teacher_model_path": str(tmp_path / "teacher"), "share_prefix": share_prefix}
    targets, reports = [], []
    for mode in ("resident", "stream"):
        config = configuration_smolvla_reflow.SmolVLAReflowConfig(**toy, **flags, teacher_offload=mode)
        student = modeling_smolvla_reflow.SmolVLAReflowPolicy.from_pretrained(
            tmp_path / "teacher", config=config
        ).train()
        seen, noise = observation(config, batch_size=2)
        targets += [student.generate_reflow_target(*seen.arguments(), noise) for _ in range(3)]
        reports.append(student.teacher.report())
    assert all(torch.equal(target, targets[0]) for target in targets)
    resident, streamed = reports
    assert streamed.mode == "stream"
    assert 0 < streamed.peak_device_bytes <= streamed.predicted_device_bytes
    assert share_prefix == "on" or streamed.predicted_device_bytes < 0.6 * resident.device_bytes
    assert (streamed.shared_bytes > 0) == (share_prefix == "on")


@pytest.mark.slow
@pytest.mark.parametrize(("share_prefix", "most_gb"), [("off", 0.25), ("on", 0.21)])
def test_at_its_published_size_a_quarter_of_a_gigabyte_is_enough(
    tmp_path: Path, share_prefix: str, most_gb: float
) -> None:
    """Check bfloat16 transformer weights, float32 projections and three cameras of 512 x 512."""
    real = settings(smolvla_toy.write_vlm(tmp_path / "vlm", smolvla_toy.REAL), 256, num_steps=2)
    modeling_smolvla.SmolVLAPolicy(configuration_smolvla.SmolVLAConfig(**real)).bfloat16().save_pretrained(
        tmp_path / "teacher"
    )
    flags = {"use_reflow": True, "teacher_model_path": str(tmp_path / "teacher"), "share_prefix": share_prefix}
    config = configuration_smolvla_reflow.SmolVLAReflowConfig(
        **real, **flags, teacher_offload="stream", teacher_dtype="bfloat16"
    )
    student = modeling_smolvla_reflow.SmolVLAReflowPolicy.from_pretrained(tmp_path / "teacher", config=config)
    seen, noise = observation(config, batch_size=1)
    targets = [student.generate_reflow_target(*seen.arguments(), noise) for _ in range(2)]
    assert torch.equal(*targets)
    report = student.teacher.report()
    assert report.peak_device_bytes <= report.predicted_device_bytes <= most_gb * 1e9
    print(share_prefix, report)
