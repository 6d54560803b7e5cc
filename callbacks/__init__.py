"""Callbacks for transformers' Trainer and its descendants, and `attach`, which does it all in one line."""

from hf_memopt.callbacks.arguments import MemoptArguments
from hf_memopt.callbacks.attach import attach
from hf_memopt.callbacks.memory_logging import LeakDetectionCallback, MemoryLoggingCallback
from hf_memopt.callbacks.offloading import ActivationOffloadCallback
from hf_memopt.callbacks.stop_on_non_finite import StopOnNonFiniteCallback
from hf_memopt.training import NonFiniteGradientError

__all__ = [
    "ActivationOffloadCallback",
    "LeakDetectionCallback",
    "MemoptArguments",
    "MemoryLoggingCallback",
    "NonFiniteGradientError",
    "StopOnNonFiniteCallback",
    "attach",
]
