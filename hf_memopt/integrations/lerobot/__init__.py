"""SmolVLA reflow for lerobot 0.6: policy type `smolvla_reflow`, for `--discover_packages_path=` of its commands."""

from hf_memopt.integrations.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig

__all__ = ["SmolVLAReflowConfig"]
