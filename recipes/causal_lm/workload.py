"""Plans for `train_causal_lm.py`: its own update, run on fake tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_memopt.planning.models.model_config import read_config
from hf_memopt.planning.simulation.patched_transformers import weights_from_config
from hf_memopt.recipes.causal_lm import data as data
from hf_memopt.recipes.causal_lm.options import Options
from hf_memopt.recipes.causal_lm.step import Batch, Run, make_model, make_optimizer, stream_weights, update
from hf_memopt.recipes.common.auto_plan import RecipeWorkload, activation_levers, reading
from hf_memopt.recipes.common.flags import read_options
from hf_memopt.weights.homes.home import HOMES

__all__ = ["workload"]


def workload(config_path: str | Path, *, precision: str = "no", effective_batch: int | None = None) -> "CausalLM":
    """Return the workload of `train_causal_lm.py --config_path FILE`; `effective_batch` counts blocks."""
    options = read_options(Options, "", reading(config_path))
    tokenizer = data.make_tokenizer(options.model, data.read_texts(options.data))
    return CausalLM(options, tokenizer, precision, effective_batch)


class CausalLM(RecipeWorkload):
    """A causal language model with the flags of its recipe; `tokenizer` gives one from scratch its vocabulary."""

    MODULE = "hf_memopt.recipes.train_causal_lm"
    BATCH = ("training.per_device_batch_size", "training.gradient_accumulation_steps")
    LEVERS: ClassVar = {
        "activations": activation_levers("model.gradient_checkpointing"),
        "optimizer_home": {home: {"training.optimizer_home": home} for home in ("off", *HOMES)}
        | {f"{home}, weights too": {"training.base": home, "training.trained": True} for home in HOMES},
    }

    def __init__(
        self, options: Options, tokenizer: Any, precision: str = "no", effective_batch: int | None = None
    ) -> None:
        name = options.model.model or f"{options.model.model_type} from scratch"
        super().__init__(name, options, precision, effective_batch)
        self._tokenizer = tokenizer

    def setup(self, options: Options, precision: str) -> tuple[Run, Iterator[Batch]]:
        training = options.training
        num_micro_batches = self.num_simulated(options, training.gradient_accumulation_steps)
        windows = GradientAccumulationPlugin(num_steps=num_micro_batches, sync_with_dataloader=False)
        accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_plugin=windows)
        with weights_from_config(AutoModelForCausalLM, read_config), accelerator.device:
            model = make_model(options.model, self._tokenizer, options.data.block_size)
        model.train()
        weights = stream_weights(model, options, accelerator.device)
        optimizer = make_optimizer(model, options, accelerator.device, weights)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        run = Run(accelerator, options, model, optimizer, schedule, weights=weights)
        return run, _batches((training.per_device_batch_size, options.data.block_size), accelerator.device)

    def step(self, state: tuple[Run, Iterator[Batch]]) -> Tensor:
        return update(*state)


def _batches(shape: tuple[int, int], device: torch.device) -> Iterator[Batch]:
    while True:
        yield {"input_ids": torch.zeros(shape, dtype=torch.long, device=device)}
