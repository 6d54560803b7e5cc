"""Plans for `train_neural_operator.py`: its own update, run on fake tensors."""

from pathlib import Path
from typing import ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor

from hf_memopt.recipes.common.auto_plan import BatchInParts, Changes, reading
from hf_memopt.recipes.common.flags import read_options
from hf_memopt.recipes.neural_operator.data import make_processor, shape_of
from hf_memopt.recipes.neural_operator.options import Options
from hf_memopt.recipes.neural_operator.step import Batch, Run, make_model, make_optimizer, update

__all__ = ["workload"]


def workload(config_path: str | Path, *, precision: str = "no", effective_batch: int | None = None) -> "NeuralOperator":
    """Return the workload of `train_neural_operator.py --config_path FILE`; `effective_batch` counts samples."""
    return NeuralOperator(read_options(Options, "", reading(config_path)), precision, effective_batch)


def _activations(blocks: bool, mlps: bool, offload: str) -> Changes:
    return {"model.checkpoint_blocks": blocks, "model.checkpoint_mlps": mlps, "offload.offload": offload}


class NeuralOperator(BatchInParts):
    """An FNO, TFNO or UNO on Darcy flow, or on the user's fields, with the flags of its recipe."""

    MODULE = "hf_memopt.recipes.train_neural_operator"
    packages = ("hf_memopt[neuralop]",)
    LEVERS: ClassVar = {
        "activations": {
            "on the device": _activations(False, False, "off"),
            "offloaded where free": _activations(False, False, "auto"),
            "blocks checkpointed": _activations(True, False, "off"),
            "all checkpointed": _activations(True, True, "off"),
            "all checkpointed, inputs offloaded": _activations(True, True, "inputs"),
        }
    }

    def __init__(self, options: Options, precision: str = "no", effective_batch: int | None = None) -> None:
        super().__init__(f"{options.model.model} at {options.data.resolution}", options, precision, effective_batch)
        self._shape = shape_of(options.data, options.model.modes)

    def setup(self, options: Options, precision: str) -> tuple[Run, Batch]:
        accelerator = Accelerator(mixed_precision=precision)
        with accelerator.device:
            model = make_model(options.model, *self._shape.for_model())
        model, optimizer = accelerator.prepare(model, make_optimizer(model, options.training))
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer)
        channels = {"x": self._shape.in_channels, "y": self._shape.out_channels}
        batch = {
            name: torch.zeros(options.training.batch_size, number, *self._shape.sides, device=accelerator.device)
            for name, number in channels.items()
        }
        processor = make_processor(torch.zeros(2, self._shape.out_channels, *[1] * len(self._shape.sides)))
        processor.to(accelerator.device)
        processor.train()
        return Run(accelerator, options, model, optimizer, schedule, processor=processor), batch

    def step(self, state: tuple[Run, Batch]) -> Tensor:
        run, batch = state
        return update(run, dict(batch))
