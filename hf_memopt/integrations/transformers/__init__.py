"""For those who train with transformers' Trainer or TRL's trainers: estimates and plans of their own runs."""

from hf_memopt.integrations.transformers.argument_file import ArgumentFile, read_argument_file
from hf_memopt.integrations.transformers.trainer_estimate import estimate_trainer
from hf_memopt.integrations.transformers.trainer_workload import TrainerWorkload

__all__ = ["ArgumentFile", "TrainerWorkload", "estimate_trainer", "read_argument_file"]
