"""For transformers' Trainer and its descendants. Read in this order:

- `attach`: everything in one line. `arguments`: the same from a command line, a YAML file or a variable.
- `every_trainer`: the same for scripts that know nothing of this library; run as a module, so not imported here.
- `offloading`, `memory_logging`, `leak_detection`, `stop_on_non_finite`, `cache_clearing`: one callback each, for plain
  registration.
"""

from hf_memopt.callbacks.arguments import MemoptArguments
from hf_memopt.callbacks.attach import attach
from hf_memopt.callbacks.cache_clearing import ClearCacheOnSaveCallback
from hf_memopt.callbacks.leak_detection import LeakDetectionCallback
from hf_memopt.callbacks.memory_logging import MemoryLoggingCallback
from hf_memopt.callbacks.offloading import ActivationOffloadCallback
from hf_memopt.callbacks.stop_on_non_finite import NonFiniteGradientError, StopOnNonFiniteCallback

__all__ = [
    "ActivationOffloadCallback",
    "ClearCacheOnSaveCallback",
    "LeakDetectionCallback",
    "MemoptArguments",
    "MemoryLoggingCallback",
    "NonFiniteGradientError",
    "StopOnNonFiniteCallback",
    "attach",
]
