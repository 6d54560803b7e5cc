"""Training that fits in the memory you have, with the same gradients.

Every name here is imported when it is first used, so that `import hf_memopt` is quick and works where only torch is
installed. What needs more is imported from where it lives: `hf_memopt.integrations.lerobot`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_memopt import reflow
    from hf_memopt.activations import (
        ActivationOffloader,
        InfeasibleBudgetError,
        OffloadStats,
        SelectiveCheckpoint,
        apply_selective_checkpointing,
        estimate_offloading_memory_savings,
        wrap_forward_with_offload,
    )
    from hf_memopt.checkpoint import Checkpoints, endless_batches
    from hf_memopt.memory import (
        LeakMonitor,
        LeakReport,
        MemoryLogger,
        MemoryTracker,
        SavedBytes,
        detect_leaks,
        explain_oom,
    )
    from hf_memopt.planning import MemoryEstimate, NothingFitsError, TrainingPlan, estimate_peak_memory, plan
    from hf_memopt.teacher import OffloadedTeacher, TeacherReport
    from hf_memopt.teacher.couplings import CouplingSource
    from hf_memopt.training import (
        GradientCache,
        MicroBatcher,
        NonFiniteGradientError,
        StepResult,
        chunked_loss,
        find_micro_batch,
        r1_penalty,
        split_batch,
        train_step,
    )
    from hf_memopt.transfer import Copier, StreamCopier, SyncCopier

__version__ = "0.1.0"

__all__ = [
    "ActivationOffloader",
    "Checkpoints",
    "Copier",
    "CouplingSource",
    "GradientCache",
    "InfeasibleBudgetError",
    "LeakMonitor",
    "LeakReport",
    "MemoryEstimate",
    "MemoryLogger",
    "MemoryTracker",
    "MicroBatcher",
    "NonFiniteGradientError",
    "NothingFitsError",
    "OffloadStats",
    "OffloadedTeacher",
    "SavedBytes",
    "SelectiveCheckpoint",
    "StepResult",
    "StreamCopier",
    "SyncCopier",
    "TeacherReport",
    "TrainingPlan",
    "__version__",
    "apply_selective_checkpointing",
    "attach",
    "chunked_loss",
    "detect_leaks",
    "endless_batches",
    "estimate_offloading_memory_savings",
    "estimate_peak_memory",
    "explain_oom",
    "find_micro_batch",
    "plan",
    "r1_penalty",
    "reflow",
    "split_batch",
    "train_step",
    "wrap_forward_with_offload",
]

_HOMES = {
    "ActivationOffloader": "hf_memopt.activations",
    "Checkpoints": "hf_memopt.checkpoint",
    "Copier": "hf_memopt.transfer",
    "CouplingSource": "hf_memopt.teacher.couplings",
    "GradientCache": "hf_memopt.training",
    "InfeasibleBudgetError": "hf_memopt.activations",
    "LeakMonitor": "hf_memopt.memory",
    "LeakReport": "hf_memopt.memory",
    "MemoryEstimate": "hf_memopt.planning",
    "MemoryLogger": "hf_memopt.memory",
    "MemoryTracker": "hf_memopt.memory",
    "MicroBatcher": "hf_memopt.training",
    "NonFiniteGradientError": "hf_memopt.training",
    "NothingFitsError": "hf_memopt.planning",
    "OffloadStats": "hf_memopt.activations",
    "OffloadedTeacher": "hf_memopt.teacher",
    "SavedBytes": "hf_memopt.memory",
    "SelectiveCheckpoint": "hf_memopt.activations",
    "StepResult": "hf_memopt.training",
    "StreamCopier": "hf_memopt.transfer",
    "SyncCopier": "hf_memopt.transfer",
    "TeacherReport": "hf_memopt.teacher",
    "TrainingPlan": "hf_memopt.planning",
    "apply_selective_checkpointing": "hf_memopt.activations",
    "attach": "hf_memopt.callbacks",
    "chunked_loss": "hf_memopt.training",
    "detect_leaks": "hf_memopt.memory",
    "endless_batches": "hf_memopt.checkpoint",
    "estimate_offloading_memory_savings": "hf_memopt.activations",
    "estimate_peak_memory": "hf_memopt.planning",
    "explain_oom": "hf_memopt.memory",
    "find_micro_batch": "hf_memopt.training",
    "plan": "hf_memopt.planning",
    "r1_penalty": "hf_memopt.training",
    "split_batch": "hf_memopt.training",
    "train_step": "hf_memopt.training",
    "wrap_forward_with_offload": "hf_memopt.activations",
}


def __getattr__(name: str) -> Any:
    if name == "reflow":
        return import_module("hf_memopt.reflow")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
