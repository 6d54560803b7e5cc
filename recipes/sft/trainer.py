"""TRL's SFTTrainer with a choice that it has no flag for: the loss from all logits."""

from typing import Any

from transformers import Trainer
from trl import SFTTrainer

from hf_memopt.recipes.sft.options import SftOptions


class FullLogitsTrainer(SFTTrainer):
    """Computes the loss as a plain Trainer does: from the logits of all tokens at once, without TRL's metrics."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return Trainer.compute_loss(self, model, {**inputs, "use_cache": False}, *args, **kwargs)


def trainer_kind(options: SftOptions) -> type[SFTTrainer]:
    return FullLogitsTrainer if options.loss == "full" else SFTTrainer
