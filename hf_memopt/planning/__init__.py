"""Know before you run: the peak memory of a training step, and settings that fit, without the accelerator."""

from hf_memopt.planning.estimate import LargeTensor, MemoryEstimate, estimate_peak_memory
from hf_memopt.planning.isolation import IsolatedError
from hf_memopt.planning.plan import NothingFitsError, Row, TrainingPlan, plan
from hf_memopt.planning.workload import Lever, SimulatedStep, Workload

__all__ = [
    "IsolatedError",
    "LargeTensor",
    "Lever",
    "MemoryEstimate",
    "NothingFitsError",
    "Row",
    "SimulatedStep",
    "TrainingPlan",
    "Workload",
    "estimate_peak_memory",
    "plan",
]
