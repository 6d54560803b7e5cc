"""Finds the cheapest settings with which a workload fits a GPU, each candidate simulated. Read in this order:

- `workload`: a training step that depends on settings.
- `settings_table`: the answer of a search, which prints itself.
- `settings_search`: `plan`, the search.
- `diffusers_models`: denoisers made from diffusers' configurations.
- `transformers_models`: models made from transformers' configurations, and their updates.
- `equal_layers`: the layers of a model that stand for all.
- `huggingface`: these models as workloads.
- `accelerate_config`: how processes share a run, simulated and in the file for `accelerate launch`.
"""

from hf_memopt.estimate.simulated_step import SimulatedStep
from hf_memopt.jobs.settings_search import NothingFitsError, plan
from hf_memopt.jobs.settings_table import Row, SettingsPlan
from hf_memopt.jobs.workload import Lever, Workload

__all__ = ["Lever", "NothingFitsError", "Row", "SettingsPlan", "SimulatedStep", "Workload", "plan"]
