"""Configuration of policy type `pi0_reflow`."""

from dataclasses import dataclass

from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi0.configuration_pi0 import PI0Config

from hf_memopt.lerobot.flow.reflow_options import ReflowOptions


@PreTrainedConfig.register_subclass("pi0_reflow")
@dataclass
class PI0ReflowConfig(ReflowOptions, PI0Config):
    """π0's configuration and the teacher's, see `ReflowOptions`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_options()
