"""Policy type `smolvla_reflow`: a SmolVLA student that learns straight paths from a teacher's couplings.

The student is an ordinary SmolVLA: same weights, same checkpoint keys, same inference. Only the training loss differs.
"""

from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

from hf_memopt.lerobot.configuration_smolvla_reflow import SmolVLAReflowConfig
from hf_memopt.lerobot.reflow.reflow_policy import ReflowPolicy


class SmolVLAReflowPolicy(ReflowPolicy, SmolVLAPolicy):
    """SmolVLA whose `forward` is the reflow loss while `use_reflow` is set, and the stock loss otherwise."""

    config_class = SmolVLAReflowConfig
    name = "smolvla_reflow"
