"""For transformers' Trainer and its descendants: `attach`, and callbacks for plain registration."""

from hf_memopt.callbacks.activation_offload import ActivationOffloadCallback
from hf_memopt.callbacks.attach import attach
from hf_memopt.callbacks.memory import MemoryLoggingCallback

__all__ = ["ActivationOffloadCallback", "MemoryLoggingCallback", "attach"]
