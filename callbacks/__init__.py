"""For transformers' Trainer and its descendants: `attach`, and callbacks for plain registration."""

from hf_memopt.callbacks.activation_offload import ActivationOffloadCallback
from hf_memopt.callbacks.attach import attach
from hf_memopt.callbacks.cache import ClearCacheOnSaveCallback
from hf_memopt.callbacks.leaks import LeakDetectionCallback
from hf_memopt.callbacks.memory import MemoryLoggingCallback
from hf_memopt.callbacks.non_finite import NonFiniteGradientError, StopOnNonFiniteCallback

__all__ = [
    "ActivationOffloadCallback",
    "ClearCacheOnSaveCallback",
    "LeakDetectionCallback",
    "MemoryLoggingCallback",
    "NonFiniteGradientError",
    "StopOnNonFiniteCallback",
    "attach",
]
