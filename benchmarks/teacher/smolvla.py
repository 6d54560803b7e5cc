"""A SmolVLA with random weights and a random batch, at the published size or at the toy's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.utils.constants import ACTION, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from torch import Tensor

from hf_memopt.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.lerobot.flow.flow_policy import Observation
from hf_memopt.lerobot.modeling_smolvla_reflow import SmolVLAReflowPolicy
from hf_memopt.recipes.reflow.smolvla_toy import POLICY_SETTINGS, REAL, TOY, VLMShape, write_vlm

ROBOT_DIM = 6  # entries of the state and of an action
LANGUAGE_TOKENS = 24


@dataclass(frozen=True)
class Size:
    vlm: VLMShape
    settings: dict[str, Any]
    num_cameras: int
    image_size: int


SIZES = {
    # lerobot/smolvla_base: lerobot's default settings and three cameras of 256x256, resized to 512x512.
    "real": Size(REAL, {"load_vlm_weights": False, "push_to_hub": False}, num_cameras=3, image_size=256),
    "toy": Size(TOY, {**POLICY_SETTINGS, "max_state_dim": 8, "max_action_dim": 8}, num_cameras=1, image_size=32),
}


def build_policy(size: Size, folder: Path, **settings: Any) -> SmolVLAReflowPolicy:
    """Build a policy on the CPU, in float32, from seed 0; `settings` override those of `size`."""
    config = SmolVLAReflowConfig(
        vlm_model_name=str(write_vlm(folder / "vlm", size.vlm)),
        device="cpu",
        **features(size),
        **{**size.settings, **settings},
    )
    torch.manual_seed(0)
    return SmolVLAReflowPolicy(config)


def features(size: Size) -> dict[str, dict[str, PolicyFeature]]:
    image = PolicyFeature(FeatureType.VISUAL, (3, size.image_size, size.image_size))
    state, action = (PolicyFeature(kind, (ROBOT_DIM,)) for kind in (FeatureType.STATE, FeatureType.ACTION))
    inputs = {OBS_STATE: state, **dict.fromkeys(_cameras(size), image)}
    return {"input_features": inputs, "output_features": {ACTION: action}}


def make_batch(size: Size, batch_size: int, device: torch.device) -> dict[str, Tensor]:
    """Make a preprocessed batch of random observations, the same on every device."""
    generator = torch.Generator().manual_seed(1)
    pixels = (batch_size, 3, size.image_size, size.image_size)
    batch = {
        OBS_STATE: torch.randn(batch_size, ROBOT_DIM, generator=generator),
        OBS_LANGUAGE_TOKENS: torch.randint(7, 250, (batch_size, LANGUAGE_TOKENS), generator=generator),
        OBS_LANGUAGE_ATTENTION_MASK: torch.ones(batch_size, LANGUAGE_TOKENS, dtype=torch.bool),
        **{key: torch.rand(*pixels, generator=generator) for key in _cameras(size)},
    }
    return {key: value.to(device) for key, value in batch.items()}


def draw_noise_and_time(policy: SmolVLAReflowPolicy, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw noise `(batch, chunk, max_action_dim)` and times `(batch,)`, the same on every device."""
    generator = torch.Generator().manual_seed(2)
    config = policy.config
    noise = torch.randn(batch_size, config.chunk_size, config.max_action_dim, generator=generator)
    time = torch.rand(batch_size, generator=generator) * 0.999 + 0.001
    return noise.to(device), time.to(device)


def observe(policy: SmolVLAReflowPolicy, batch: dict[str, Tensor]) -> Observation:
    """Return the inputs of the policy's model, made as in lerobot's forward."""
    images, image_masks = policy.prepare_images(batch)
    return Observation(
        images,
        image_masks,
        batch[OBS_LANGUAGE_TOKENS],
        batch[OBS_LANGUAGE_ATTENTION_MASK],
        policy.prepare_state(batch),
    )


def _cameras(size: Size) -> list[str]:
    return [f"observation.images.camera{index + 1}" for index in range(size.num_cameras)]
