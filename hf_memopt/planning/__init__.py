"""Predicts the memory and time of training steps without the accelerator; README.md follows one step through the files.

It imports late, so that a job is described, and a card found, without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # spelled "x as x": exported names, for type checkers
    from hf_memopt.planning.estimate import estimate_peak_memory as estimate_peak_memory
    from hf_memopt.planning.estimate_report import LargeTensor as LargeTensor
    from hf_memopt.planning.estimate_report import MemoryEstimate as MemoryEstimate
    from hf_memopt.planning.job import Job as Job
    from hf_memopt.planning.search.search import NothingFitsError as NothingFitsError
    from hf_memopt.planning.search.search import plan as plan
    from hf_memopt.planning.search.table import Row as Row
    from hf_memopt.planning.search.table import SettingsPlan as SettingsPlan
    from hf_memopt.planning.simulated_step import SimulatedStep as SimulatedStep
    from hf_memopt.planning.simulation.child_process import IsolatedError as IsolatedError
    from hf_memopt.planning.workload import Lever as Lever
    from hf_memopt.planning.workload import Workload as Workload
    from hf_memopt.planning.workloads.of_job import workload_of as workload_of
    from hf_memopt.planning.workloads.trainer_estimate import estimate_trainer as estimate_trainer

_HOMES = {
    "IsolatedError": "simulation.child_process",
    "Job": "job",
    "LargeTensor": "estimate_report",
    "Lever": "workload",
    "MemoryEstimate": "estimate_report",
    "NothingFitsError": "search.search",
    "Row": "search.table",
    "SettingsPlan": "search.table",
    "SimulatedStep": "simulated_step",
    "Workload": "workload",
    "estimate_peak_memory": "estimate",
    "estimate_trainer": "workloads.trainer_estimate",
    "plan": "search.search",
    "workload_of": "workloads.of_job",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
