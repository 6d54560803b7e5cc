"""Activation offloading: until backward needs saved tensors they live in a memory below, or are computed again."""

from hf_memopt.activations.checkpointing.selective import SelectiveCheckpoint, apply_selective_checkpointing
from hf_memopt.activations.offloader import ActivationOffloader, wrap_forward_with_offload
from hf_memopt.activations.planner.offload_plan import InfeasibleBudgetError, OffloadReport
from hf_memopt.activations.planner.savings import estimate_offloading_memory_savings
from hf_memopt.activations.stats import OffloadStats
from hf_memopt.activations.wrapped_module import WrappedModule

__all__ = [
    "ActivationOffloader",
    "InfeasibleBudgetError",
    "OffloadReport",
    "OffloadStats",
    "SelectiveCheckpoint",
    "WrappedModule",
    "apply_selective_checkpointing",
    "estimate_offloading_memory_savings",
    "wrap_forward_with_offload",
]
