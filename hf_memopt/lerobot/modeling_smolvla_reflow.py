"""Policy type `smolvla_reflow`: SmolVLA, but for a training loss that learns straight paths from couplings."""

from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

from hf_memopt.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.lerobot.reflow.reflow_policy import ReflowPolicy


class SmolVLAReflowPolicy(ReflowPolicy, SmolVLAPolicy):
    config_class = SmolVLAReflowConfig
    name = "smolvla_reflow"
