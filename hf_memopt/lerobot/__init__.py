"""Reflow for lerobot 0.6: policy types `smolvla_reflow`, `pi0_reflow` and `pi05_reflow`. README.md follows a batch.

lerobot's commands find them by the distribution `lerobot_policy_smolvla_reflow` (in `plugins/`), or where they are told
`--discover_packages_path=hf_memopt.lerobot`.
"""

from hf_memopt.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.lerobot.pi0.configuration_pi0_reflow import PI0ReflowConfig, PI05ReflowConfig

__all__ = ["PI0ReflowConfig", "PI05ReflowConfig", "SmolVLAReflowConfig"]
