"""Plans for `train_neural_operator.py`: its own update, run on fake tensors."""

from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from neuralop.data.transforms.data_processors import DefaultDataProcessor
from neuralop.data.transforms.normalizers import UnitGaussianNormalizer
from neuralop.training import AdamW
from torch import Tensor

from hf_memopt.recipes import train_neural_operator as recipe
from hf_memopt.recipes.causal_lm.model import make_offloader
from hf_memopt.recipes.common.auto_plan import Changes, RecipeWorkload
from hf_memopt.recipes.common.flags import read_flags
from hf_memopt.recipes.neural_operator.model import make_model
from hf_memopt.recipes.neural_operator.options import Options


def workload(config_path: str | Path, *, precision: str = "no", effective_batch: int | None = None) -> "NeuralOperator":
    """The workload of a file of flags, as for `train_neural_operator.py @FILE`.

    Args:
        config_path: one flag per line.
        precision: "no", "bf16", or "auto" to try both.
        effective_batch: samples per update; None, what the flags make it.
    """
    options = Options(*read_flags(Options.__annotations__.values(), recipe.__doc__, [f"@{config_path}"]))
    return NeuralOperator(options, precision=precision, effective_batch=effective_batch)


def _activations(blocks: bool, mlps: bool, offload: str) -> Changes:
    return {"model.checkpoint_blocks": blocks, "model.checkpoint_mlps": mlps, "offload.offload": offload}


class NeuralOperator(RecipeWorkload):
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

    def __init__(self, options: Options, *, precision: str = "no", effective_batch: int | None = None) -> None:
        batch = options.training.batch_size if effective_batch is None else effective_batch
        super().__init__(f"{options.model.model} at {options.data.resolution}", options, batch, precision)

    def batching(self, micro_batch: int) -> Changes:
        parts = 0 if micro_batch == self.effective_batch else micro_batch
        return {"training.batch_size": self.effective_batch, "training.micro_batch_size": parts}

    def num_simulated(self, options: Options, accumulation: int) -> int:
        """All of them: they are parts of a batch that lies on the device as a whole."""
        return accumulation

    def setup(self, options: Options, precision: str) -> tuple["recipe.Run", recipe.Batch]:
        training = options.training
        accelerator = Accelerator(mixed_precision=precision)
        with accelerator.device:
            model = make_model(options.model)
        optimizer = AdamW(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)
        model, optimizer = accelerator.prepare(model, optimizer)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer)
        shape = (training.batch_size, 1, options.data.resolution, options.data.resolution)
        batch = {name: torch.zeros(shape, device=accelerator.device) for name in ("x", "y")}
        run = recipe.Run(
            accelerator=accelerator,
            model=model,
            optimizer=optimizer,
            scheduler=schedule,
            batches=None,
            offloader=make_offloader(options.offload.offload, options.offload, accelerator.device),
            mode=options.offload.offload,
            tests={},
            processor=_processor(accelerator.device),
            train_loss=training.train_loss,
            micro_batch_size=training.micro_batch_size or training.batch_size,
            epoch_loss=torch.zeros((), device=accelerator.device),
        )
        return run, batch

    def step(self, state: Any) -> Tensor:
        run, batch = state
        return recipe.update(run, dict(batch))


def _processor(device: torch.device) -> DefaultDataProcessor:
    """As neuralop's Darcy data make it: solutions are normalised, coefficients are not."""
    normalizer = UnitGaussianNormalizer(mean=torch.zeros(1, 1, 1, 1), std=torch.ones(1, 1, 1, 1), dim=[0, 1, 2, 3])
    processor = DefaultDataProcessor(in_normalizer=None, out_normalizer=normalizer).to(device)
    processor.train()
    return processor
