"""Finds the cheapest settings with which a workload fits a GPU, each candidate simulated."""

from hf_memopt.estimate.simulated_step import SimulatedStep
from hf_memopt.jobs.settings_search import NothingFitsError, plan
from hf_memopt.jobs.settings_table import Row, SettingsPlan
from hf_memopt.jobs.workload import Lever, Workload

__all__ = ["Lever", "NothingFitsError", "Row", "SettingsPlan", "SimulatedStep", "Workload", "plan"]
