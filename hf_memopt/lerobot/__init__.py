"""Reflow for lerobot 0.6: policy types `smolvla_reflow` and `pi0_reflow`.

lerobot's commands find them by the distribution `lerobot_policy_smolvla_reflow` (in `plugins/`), or where they are told
`--discover_packages_path=hf_memopt.lerobot`. README.md follows one batch through the files.
"""

from hf_memopt.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.lerobot.pi0.configuration_pi0_reflow import PI0ReflowConfig

__all__ = ["PI0ReflowConfig", "SmolVLAReflowConfig"]
