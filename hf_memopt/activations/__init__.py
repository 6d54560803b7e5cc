"""Activation offloading: what autograd saves lives in host memory until backward needs it."""

from hf_memopt.activations.offloader import ActivationOffloader, OffloadStats, WrappedModule, wrap_forward_with_offload

__all__ = ["ActivationOffloader", "OffloadStats", "WrappedModule", "wrap_forward_with_offload"]
