"""For those who train with transformers' Trainer or TRL's trainers. Read in this order:

- `trainer_estimate`: `estimate_trainer`, the memory of a trainer's own training steps.
- `trainer_batches`: which of its batches are simulated.
- `simulated_trainer`: the trainer on an accelerator without hardware.
"""

from hf_memopt.integrations.transformers.trainer_estimate import estimate_trainer

__all__ = ["estimate_trainer"]
