"""Training that fits in the memory you have, with the same gradients.

The names that most programs need are here; others are imported from their package, such as
`hf_memopt.training.StepResult`. Public are the names that a module lists in `__all__`. All others are private, although
no underscore says so, and may change at any time.

Read the packages in this order:

- `transfer`: copies between device and host memory. `reflow`: the arithmetic of rectified flow.
- `memory`: the uses of memory, and leaks.
- `activations`: keep, offload or recompute saved tensors.
- `weights`: frozen models whose weights visit the device.
- `training`, `checkpoint`: one exact optimizer step on Accelerate, and the state of a run on disk.
- `exactness`: two runs of the same training, compared bit by bit.
- `planning`: the peak memory of a step, and settings that fit, before a run starts.
- `report`, `cli`: pages about runs and machines, and the command `hf-memopt`.
- `lerobot`, `callbacks`, `integrations`, `recipes`: policies for lerobot, Trainer and other trainers, recipes.

Each name is imported when it is first used: `import hf_memopt` is quick and works where only torch is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # spelled "x as x": exported names, for type checkers
    from hf_memopt import reflow as reflow
    from hf_memopt.activations import ActivationOffloader as ActivationOffloader
    from hf_memopt.activations import InfeasibleBudgetError as InfeasibleBudgetError
    from hf_memopt.activations import SelectiveCheckpoint as SelectiveCheckpoint
    from hf_memopt.activations import apply_selective_checkpointing as apply_selective_checkpointing
    from hf_memopt.activations import estimate_offloading_memory_savings as estimate_offloading_memory_savings
    from hf_memopt.activations import wrap_forward_with_offload as wrap_forward_with_offload
    from hf_memopt.callbacks import ActivationOffloadCallback as ActivationOffloadCallback
    from hf_memopt.callbacks import LeakDetectionCallback as LeakDetectionCallback
    from hf_memopt.callbacks import MemoptArguments as MemoptArguments
    from hf_memopt.callbacks import MemoryLoggingCallback as MemoryLoggingCallback
    from hf_memopt.callbacks import StopOnNonFiniteCallback as StopOnNonFiniteCallback
    from hf_memopt.callbacks import attach as attach
    from hf_memopt.checkpoint import Checkpoints as Checkpoints
    from hf_memopt.exactness import verify as verify
    from hf_memopt.memory import MemoryTracker as MemoryTracker
    from hf_memopt.memory import detect_leaks as detect_leaks
    from hf_memopt.memory import explain_oom as explain_oom
    from hf_memopt.planning import estimate_peak_memory as estimate_peak_memory
    from hf_memopt.planning import plan as plan
    from hf_memopt.training import GradientCache as GradientCache
    from hf_memopt.training import MicroBatcher as MicroBatcher
    from hf_memopt.training import train_step as train_step
    from hf_memopt.transfer import SyncCopier as SyncCopier
    from hf_memopt.weights import OffloadedOptimizer as OffloadedOptimizer
    from hf_memopt.weights import OffloadedTeacher as OffloadedTeacher
    from hf_memopt.weights import StreamedWeights as StreamedWeights

__version__ = "0.2.0"

_NAMES = {
    "activations": "ActivationOffloader InfeasibleBudgetError SelectiveCheckpoint apply_selective_checkpointing "
    "estimate_offloading_memory_savings wrap_forward_with_offload",
    "callbacks": "ActivationOffloadCallback LeakDetectionCallback MemoptArguments MemoryLoggingCallback "
    "StopOnNonFiniteCallback attach",
    "checkpoint": "Checkpoints",
    "exactness": "verify",
    "memory": "MemoryTracker detect_leaks explain_oom",
    "planning": "estimate_peak_memory plan",
    "training": "GradientCache MicroBatcher train_step",
    "transfer": "SyncCopier",
    "weights": "OffloadedOptimizer OffloadedTeacher StreamedWeights",
}
_HOMES = {name: f"{__name__}.{package}" for package, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", "reflow", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "reflow":
        return import_module("hf_memopt.reflow")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
