"""The adapters of the policies."""

from collections.abc import Mapping

from lerobot.configs import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from hf_memopt.lerobot.flow.flow_policy import FlowPolicy, Observation
from hf_memopt.lerobot.flow.pi0_flow import Pi0Flow, Pi05Flow
from hf_memopt.lerobot.flow.smolvla_flow import SmolVLAFlow

_FLOWS: dict[str, FlowPolicy] = {flow.stock_type: flow for flow in (SmolVLAFlow(), Pi0Flow(), Pi05Flow())}
STOCK_TYPES = tuple(_FLOWS)
POLICY_TYPES = tuple(name for stock in STOCK_TYPES for name in (stock, f"{stock}_reflow"))


def flow_of(config: PreTrainedConfig) -> FlowPolicy:
    return _FLOWS[config.type.removesuffix("_reflow")]


def observe(policy: PreTrainedPolicy, batch: Mapping[str, Tensor]) -> Observation:
    return flow_of(policy.config).observe(policy, batch)
