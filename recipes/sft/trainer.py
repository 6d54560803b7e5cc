"""TRL's SFTTrainer with two choices that it has no flags for: the loss from all logits, and AdamW on the host."""

from typing import Any

import torch
from transformers import Trainer
from trl import SFTTrainer

from hf_memopt.recipes.sft.options import SftOptions


class FullLogitsTrainer(SFTTrainer):
    """Computes the loss as a plain Trainer does: from the logits of all tokens at once, without TRL's metrics."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return Trainer.compute_loss(self, model, {**inputs, "use_cache": False}, *args, **kwargs)


def trainer_kind(options: SftOptions) -> type[SFTTrainer]:
    return FullLogitsTrainer if options.loss == "full" else SFTTrainer


def optimizer_of(options: SftOptions, training: Any) -> dict[str, Any]:
    """Return the trainer's argument for an optimizer on the host: torchao's, whose state never leaves host memory."""
    if options.optimizer_on == "device":
        return {}
    from torchao.optim import CPUOffloadOptimizer

    betas = training.adam_beta1, training.adam_beta2
    settings = {"lr": training.learning_rate, "betas": betas, "eps": training.adam_epsilon}
    # Accelerate loads each optimizer's own state, after which torchao's would ignore learning rates of small weights.
    kind = {"optimizer_class": torch.optim.AdamW, "minimal_size": 0}
    return {"optimizer_cls_and_kwargs": (CPUOffloadOptimizer, kind | settings)}
