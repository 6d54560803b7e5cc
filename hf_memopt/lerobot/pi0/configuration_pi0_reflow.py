"""Configurations of policy types `pi0_reflow` and `pi05_reflow`."""

from dataclasses import dataclass

from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi05.configuration_pi05 import PI05Config

from hf_memopt.lerobot.flow.reflow_options import ReflowOptions


@PreTrainedConfig.register_subclass("pi0_reflow")
@dataclass
class PI0ReflowConfig(ReflowOptions, PI0Config):
    """π0's configuration and the teacher's, see `ReflowOptions`."""


@PreTrainedConfig.register_subclass("pi05_reflow")
@dataclass
class PI05ReflowConfig(ReflowOptions, PI05Config):
    """π0.5's configuration and the teacher's, see `ReflowOptions`."""
