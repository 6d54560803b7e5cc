"""Policy types `smolvla_reflow`, `pi0_reflow` and `pi05_reflow` for lerobot's commands, which import this package."""

from hf_memopt.lerobot import PI0ReflowConfig, PI05ReflowConfig, SmolVLAReflowConfig

__all__ = ["PI0ReflowConfig", "PI05ReflowConfig", "SmolVLAReflowConfig"]
