"""Plans for `train_lgt.py`: its own update, run on fake tensors."""

from pathlib import Path
from typing import ClassVar

import torch
from accelerate import Accelerator
from torch.optim.swa_utils import AveragedModel

from hf_memopt.planning.workload import Settings, divisors
from hf_memopt.recipes.common.auto_plan import PRECISION, WAYS, RecipeWorkload, activation_levers, reading, with_changes
from hf_memopt.recipes.lgt.data import Batch, make_batch
from hf_memopt.recipes.lgt.options import Options, parse
from hf_memopt.recipes.lgt.step import Run, build_model, build_optimizer, update_weights

__all__ = ["workload"]

_MOST_PASSES = 8


def workload(
    config_path: str | Path, *, precision: str | None = None, effective_batch: int | None = None
) -> "LatentTransferWorkload":
    """Return the workload of `train_lgt.py --config_path FILE`; `effective_batch` counts latents."""
    options = parse("", reading(config_path))
    return LatentTransferWorkload(options, precision, effective_batch)


class LatentTransferWorkload(RecipeWorkload):
    """LGT style transfer with the fields of its configuration."""

    MODULE = "hf_memopt.recipes.train_lgt"
    BATCH = ("training.batch_size", "training.accumulation_steps")
    RESUMED = "checkpoint.resume_from_checkpoint"
    LEVERS: ClassVar = {"activations": activation_levers("training.use_gradient_checkpointing", WAYS[:3])}

    def __init__(self, options: Options, precision: str | None = None, effective_batch: int | None = None) -> None:
        training = options.training
        precision = ("bf16" if training.use_amp else "no") if precision is None else precision
        name = f"LGT with {training.ode_integration_steps} Euler steps"
        super().__init__(name, options, precision, effective_batch)

    @property
    def micro_batches(self) -> list[int]:
        """Return the sizes that give the same loss: with a gradient cache alone may a batch be divided.

        Accumulated batches have another SWD than one. There are no more forward passes than are quickly simulated.
        """
        training = self.options.training
        if training.gradient_cache:
            return [size for size in divisors(self.effective_batch) if self.effective_batch // size <= _MOST_PASSES]
        if self.effective_batch % training.batch_size:
            raise ValueError(
                f"effective_batch={self.effective_batch} is not a multiple of "
                f"training.batch_size={training.batch_size}, and another batch has another loss; use a multiple, or "
                "training.gradient_cache"
            )
        return [training.batch_size]

    def with_settings(self, settings: Settings, micro_batch: int) -> Options:
        options = super().with_settings(settings, micro_batch)
        return with_changes(options, {"training.use_amp": settings[PRECISION] != "no"})

    def num_simulated(self, options: Options, accumulation: int) -> int:
        """Return all of them with a gradient cache, since the loss is of their outputs together."""
        return accumulation if options.training.gradient_cache else min(2, accumulation)

    def setup(self, options: Options, precision: str) -> tuple[Run, list[Batch]]:
        accelerator = Accelerator(mixed_precision=precision, step_scheduler_with_optimizer=False)
        with accelerator.device:
            model = build_model(options)
        average = AveragedModel(model) if options.training.ema_decay is not None else None
        model, optimizer = accelerator.prepare(model, build_optimizer(options, model))
        run = Run(accelerator, options, model, optimizer, average=average)
        count = self.num_simulated(options, options.training.accumulation_steps)
        return run, [make_batch(options, accelerator.device) for _ in range(count)]

    def step(self, state: tuple[Run, list[Batch]]) -> dict[str, torch.Tensor]:
        run, window = state
        update_weights(run, window)
        if run.average is not None:
            run.average.update_parameters(run.model)
        return run.objective.take_means()
