"""Configuration of policy type `smolvla_reflow`."""

from dataclasses import dataclass

from lerobot.configs import PreTrainedConfig
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

from hf_memopt.lerobot.flow.reflow_options import ReflowOptions, absolute_if_local


@PreTrainedConfig.register_subclass("smolvla_reflow")
@dataclass
class SmolVLAReflowConfig(ReflowOptions, SmolVLAConfig):
    """SmolVLA's configuration and the teacher's, see `ReflowOptions`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vlm_model_name: str | None = absolute_if_local(self.vlm_model_name)
        if not self.use_reflow:
            return
        if not self.use_cache:
            raise ValueError("use_cache=false: SmolVLA cannot sample without its cache; set --policy.use_cache=true")
        if self.data_share > 0 and self.prefix_length > 0:
            raise ValueError(f"reflow_real_data={self.data_share} needs prefix_length=-1; {self.prefix_length} is set")
