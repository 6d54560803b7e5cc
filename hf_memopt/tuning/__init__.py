"""Finds the cheapest settings with which a workload fits a GPU, each candidate simulated. Read in this order:

- `workload`: a training step that depends on settings.
- `settings_search`: `plan`, the search.
- `settings_table`: its answer in words and as a table.
- `model_config`, `huggingface`: workloads made from transformers' configurations.
- `adapters`: PEFT's, on a model that is simulated.
- `accelerate_config`: writes the answer for `accelerate launch`.
"""

from hf_memopt.tuning.settings_search import NothingFitsError, Row, TrainingPlan, plan
from hf_memopt.tuning.workload import SearchDimension, SimulatedStep, Workload

__all__ = ["NothingFitsError", "Row", "SearchDimension", "SimulatedStep", "TrainingPlan", "Workload", "plan"]
