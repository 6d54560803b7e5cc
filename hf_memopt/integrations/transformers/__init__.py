"""For those who train with transformers' Trainer or TRL's trainers. Read in this order:

- `trainer_estimate`: `estimate_trainer`, the memory of a trainer's own training steps.
- `trainer_batches`: which of its batches are simulated.
- `simulated_trainer`: the trainer on an accelerator without hardware.
- `argument_file`, `file_trainer`: a file of arguments, and the trainer that it describes.
- `file_workload`: the same, and a spec's `training_args`, as a workload that can be planned.
"""

from hf_memopt.integrations.transformers.argument_file import ArgumentFile, read_argument_file
from hf_memopt.integrations.transformers.file_workload import FileWorkload
from hf_memopt.integrations.transformers.trainer_estimate import estimate_trainer

__all__ = ["ArgumentFile", "FileWorkload", "estimate_trainer", "read_argument_file"]
