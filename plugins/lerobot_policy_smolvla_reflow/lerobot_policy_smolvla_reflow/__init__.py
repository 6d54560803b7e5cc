"""Policy types `smolvla_reflow` and `pi0_reflow` for lerobot's commands, which import this package by its name."""

from hf_memopt.lerobot import PI0ReflowConfig, SmolVLAReflowConfig

__all__ = ["PI0ReflowConfig", "SmolVLAReflowConfig"]
