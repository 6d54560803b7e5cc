"""Finds the cheapest settings with which a workload fits a GPU; imports late, so that a spec is read without torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # spelled "x as x": exported names, for type checkers
    from hf_memopt.estimate.simulated_step import SimulatedStep as SimulatedStep
    from hf_memopt.jobs.settings_search import NothingFitsError as NothingFitsError
    from hf_memopt.jobs.settings_search import plan as plan
    from hf_memopt.jobs.settings_table import Row as Row
    from hf_memopt.jobs.settings_table import SettingsPlan as SettingsPlan
    from hf_memopt.jobs.spec import Job as Job
    from hf_memopt.jobs.workload import Lever as Lever
    from hf_memopt.jobs.workload import Workload as Workload
    from hf_memopt.jobs.workloads import workload_of as workload_of

_HOMES = {
    "Job": "jobs.spec",
    "Lever": "jobs.workload",
    "NothingFitsError": "jobs.settings_search",
    "Row": "jobs.settings_table",
    "SettingsPlan": "jobs.settings_table",
    "SimulatedStep": "estimate.simulated_step",
    "Workload": "jobs.workload",
    "plan": "jobs.settings_search",
    "workload_of": "jobs.workloads",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hf_memopt.{_HOMES[name]}"), name)
