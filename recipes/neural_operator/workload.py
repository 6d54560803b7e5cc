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
    """An FNO, TFNO or UNO on Darcy flow with the flags of its recipe."""

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

    def setup(self, options: Options, precision: str) -> tuple[Run, Batch]:
        accelerator = Accelerator(mixed_precision=precision)
        with accelerator.device:
            model = make_model(options.model)
        model, optimizer = accelerator.prepare(model, make_optimizer(model, options.training))
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer)
        run = Run(accelerator, options, model, optimizer, schedule, processor=_processor(accelerator.device))
        shape = (options.training.batch_size, 1, options.data.resolution, options.data.resolution)
        return run, {name: torch.zeros(shape, device=accelerator.device) for name in ("x", "y")}

    def step(self, state: tuple[Run, Batch]) -> Tensor:
        run, batch = state
        return update(run, dict(batch))


def _processor(device: torch.device) -> DefaultDataProcessor:
    """Return the processor of neuralop's Darcy data: solutions are normalised, coefficients are not."""
    normalizer = UnitGaussianNormalizer(mean=torch.zeros(1, 1, 1, 1), std=torch.ones(1, 1, 1, 1), dim=[0, 1, 2, 3])
    processor = DefaultDataProcessor(in_normalizer=None, out_normalizer=normalizer).to(device)
    processor.train()
    return processor
