"""Policy type `smolvla_reflow` for lerobot's commands, which import this package because of its name."""

from hf_memopt.integrations.lerobot import SmolVLAReflowConfig

__all__ = ["SmolVLAReflowConfig"]
