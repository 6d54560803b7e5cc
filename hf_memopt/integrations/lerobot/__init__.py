"""SmolVLA reflow for lerobot 0.6: policy type `smolvla_reflow`.

lerobot's commands find it by the distribution `lerobot_policy_smolvla_reflow` (in `plugins/`), or where they are told
`--discover_packages_path=hf_memopt.integrations.lerobot`.
"""

from hf_memopt.integrations.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig

__all__ = ["SmolVLAReflowConfig"]
