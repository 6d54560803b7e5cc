"""Plans for `train_neural_operator.py`: its own update, run on fake tensors."""

from pathlib import Path
from typing import ClassVar

import torch
from accelerate import Accelerator
from neuralop.data.transforms.data_processors import DefaultDataProcessor
from neuralop.data.transforms.normalizers import UnitGaussianNormalizer
from torch import Tensor

from hf_memopt.recipes.common.auto_plan import BatchInParts, Changes
from hf_memopt.recipes.common.flags import read_options
from hf_memopt.recipes.neural_operator.data import shape_of
from hf_memopt.recipes.neural_operator.model import make_model
from hf_memopt.recipes.neural_operator.options import Options
from hf_memopt.recipes.neural_operator.step import Batch, Run, make_optimizer, update

__all__ = ["workload"]


def workload(config_path: str | Path, *, precision: str = "no", effective_batch: int | None = None) -> "NeuralOperator":
    """Return the workload of a configuration file, as for `train_neural_operator.py --config_path FILE`.

    `precision` is "no", "bf16", or "auto" to try both; `effective_batch` counts samples per update, None as the file.
    """
    return NeuralOperator(read_options(Options, "", ["--config_path", str(config_path)]), precision, effective_batch)


def _activations(blocks: bool, mlps: bool, offload: str) -> Changes:
    return {"model.checkpoint_blocks": blocks, "model.checkpoint_mlps": mlps, "offload.offload": offload}


class NeuralOperator(BatchInParts):
    """An FNO, TFNO or UNO on Darcy flow, or on the user's fields, with the flags of its recipe."""

    MODULE = "hf_memopt.recipes.train_neural_operator"
    LEVERS: ClassVar = {
        "activations": {
            "kept": _activations(False, False, "off"),
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
        run = Run(accelerator, options, model, optimizer, schedule, processor=_processor(batch["y"]))
        return run, batch

    def step(self, state: tuple[Run, Batch]) -> Tensor:
        run, batch = state
        return update(run, dict(batch))


def _processor(y: Tensor) -> DefaultDataProcessor:
    """Return a processor as `make_processor` fits it to solutions: they are normalised, inputs are not."""
    size = (1, y.shape[1], *[1] * (y.ndim - 2))
    axes = [axis for axis in range(y.ndim) if axis != 1]
    normalizer = UnitGaussianNormalizer(mean=torch.zeros(size), std=torch.ones(size), dim=axes)
    processor = DefaultDataProcessor(in_normalizer=None, out_normalizer=normalizer).to(y.device)
    processor.train()
    return processor
