"""Students of a toy SmolVLA with two cameras, and their teacher's results in stock lerobot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from torch import Tensor

from hf_memopt.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.lerobot.flow.known_flows import observe
from hf_memopt.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.recipes.reflow.smolvla_toy import CAMERA, IMAGE_SIZE, PATH_STEPS, POLICY_SETTINGS

BATCH, CHUNK, WIDTH, STATE_DIM = 4, PATH_STEPS, 16, 14
SECOND_CAMERA = "observation.images.wrist"
# Rounding: the shared path adds the same float32 numbers in another order (a token's attention over the prefix and
# itself in two parts, the prefix without the action tokens in the same matrix product).
TOLERANCE = 1e-5


def robot() -> dict[str, Any]:
    """Return features of two cameras, and fewer dimensions than the policy has."""
    image = PolicyFeature(FeatureType.VISUAL, (3, IMAGE_SIZE, IMAGE_SIZE))
    state = PolicyFeature(FeatureType.STATE, (STATE_DIM,))
    return {
        "max_state_dim": WIDTH,
        "max_action_dim": WIDTH,
        "input_features": {"observation.state": state, CAMERA: image, SECOND_CAMERA: image},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (STATE_DIM,))},
    }


def settings(vlm: Path, **changes: Any) -> dict[str, Any]:
    return {**POLICY_SETTINGS, "vlm_model_name": str(vlm), "device": "cpu", **robot(), **changes}


def write_teacher(vlm: Path, folder: Path, architecture: dict[str, Any]) -> Path:
    """Save random weights."""
    torch.manual_seed(0)
    SmolVLAPolicy(SmolVLAConfig(**settings(vlm, **architecture))).save_pretrained(folder)
    return folder


def make_student(
    vlm: Path, teacher: Path, architecture: dict[str, Any], move_state_proj: bool, flags: dict[str, Any]
) -> SmolVLAReflowPolicy:
    """Return a student whose trained weights have moved away from its teacher's."""
    fields = {"use_reflow": True, "teacher_model_path": str(teacher), "teacher_offload": "swap", **flags}
    config = SmolVLAReflowConfig(**{**settings(vlm, **architecture), **fields})
    student = SmolVLAReflowPolicy.from_pretrained(teacher, config=config)
    return moved(student, leave=() if move_state_proj else ("state_proj",))


def moved(student: Any, leave: Sequence[str] = ()) -> Any:
    """Move trained weights, except names with these words, and return the student in training mode."""
    torch.manual_seed(1)
    for name, parameter in student.named_parameters():
        if parameter.requires_grad and not any(word in name for word in leave):
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    return student.train()


def make_batch() -> dict[str, Tensor]:
    """Return padded instructions, with a camera that is missing from one sample."""
    generator = torch.Generator().manual_seed(1)
    masks = torch.ones(BATCH, 5, dtype=torch.bool)
    masks[1, 3:] = False
    return {
        "observation.state": torch.randn(BATCH, STATE_DIM, generator=generator),
        CAMERA: torch.rand(BATCH, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator),
        SECOND_CAMERA: torch.rand(BATCH, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator),
        f"{SECOND_CAMERA}_padding_mask": torch.tensor([True, False, True, True]),
        "observation.language.tokens": torch.randint(7, 290, (BATCH, 5), generator=generator),
        "observation.language.attention_mask": masks,
        "action": torch.randn(BATCH, CHUNK, STATE_DIM, generator=generator),
    }


def gradients(policy: SmolVLAReflowPolicy) -> dict[str, Tensor]:
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def second_step(policy: Any, batch: dict[str, Tensor], noise: Tensor, time: Tensor) -> list[Tensor]:
    """Return loss and gradients of the second of two equal steps: a streamed teacher's first visit is watched."""
    for _ in range(2):
        policy.zero_grad()
        loss, _ = policy(batch, noise=noise, time=time)
        loss.backward()
        policy.update()
    return [loss.detach(), *gradients(policy).values()]


def target(policy: SmolVLAReflowPolicy, batch: dict[str, Tensor], noise: Tensor) -> Tensor:
    """Return the teacher's target of a noise."""
    return policy.generate_reflow_target(*observe(policy, batch).arguments(), noise)


def stock_target(policy: SmolVLAReflowPolicy, batch: dict[str, Tensor], noise: Tensor, **changes: Any) -> Tensor:
    """Return samples of the teacher's own checkpoint in stock lerobot, never offloaded."""
    teacher = SmolVLAPolicy.from_pretrained(policy.config.teacher_model_path, strict=True)
    for name, value in changes.items():
        setattr(teacher.config, name, value)
    return teacher.model.sample_actions(*observe(policy, batch).arguments(), noise=noise).detach()
