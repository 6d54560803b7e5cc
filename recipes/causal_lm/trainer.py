"""The training of `train_causal_lm.py` by transformers' Trainer instead of a loop of its own."""

import math
from typing import Any

from accelerate.utils import set_seed
from datasets import DatasetDict
from transformers import (
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)

from hf_memopt.callbacks import attach
from hf_memopt.recipes.causal_lm.model import make_model
from hf_memopt.recipes.causal_lm.options import Options, TrainingOptions
from hf_memopt.recipes.common.cost import RunCost, StepTimer, announce
from hf_memopt.recipes.common.loop import pins_memory
from hf_memopt.recipes.common.options import trainers_checkpoint
from hf_memopt.recipes.common.results import History

# Flags that Trainer has under the same names.
TRAINERS_NAMES = (
    *("output_dir", "max_steps", "gradient_accumulation_steps", "learning_rate", "weight_decay"),
    *("lr_scheduler_type", "warmup_steps", "max_grad_norm", "seed", "report_to"),
)


def train_with_trainer(
    options: Options, tokenizer: PreTrainedTokenizerBase, blocks: DatasetDict
) -> tuple[History, RunCost]:
    """Train, evaluate and save; return the log and the cost of an update.

    Loss and gradients are Trainer's own: with accumulation it weighs by tokens where this recipe's loop averages over
    forward passes, which is the same for blocks of equal size.
    """
    resumed = trainers_checkpoint(options.training.output_dir, options.training.resume_from_checkpoint)
    set_seed(options.training.seed)
    trainer = Trainer(
        make_model(options.model, tokenizer, options.data.block_size),
        training_arguments(options.training),
        train_dataset=with_labels(blocks["train"]),
        eval_dataset=with_labels(blocks["test"]),
        data_collator=default_data_collator,
    )
    offloader = options.offload.make_offloader(trainer.accelerator.device)
    attach(trainer, offloader=offloader)
    timer = StepTimer(options.offload.offload, trainer.accelerator.device, offloader)
    trainer.add_callback(TimerCallback(timer))
    announce(trainer.model, options.offload, trainer.accelerator)
    trainer.train(resume_from_checkpoint=resumed)
    cost = timer.cost()
    if trainer.state.global_step % options.training.eval_every:
        trainer.evaluate()
    trainer.save_model()
    return history(trainer.state), cost


def training_arguments(training: TrainingOptions) -> TrainingArguments:
    return TrainingArguments(
        **{name: getattr(training, name) for name in TRAINERS_NAMES},
        per_device_train_batch_size=training.per_device_batch_size,
        per_device_eval_batch_size=training.per_device_batch_size,
        logging_steps=training.log_every,
        eval_strategy="steps",
        eval_steps=training.eval_every,
        save_strategy="steps" if training.checkpointing_steps else "no",
        save_steps=training.checkpointing_steps or training.max_steps,
        save_total_limit=training.checkpoints_total_limit,
        dataloader_pin_memory=pins_memory(),
    )


class TimerCallback(TrainerCallback):
    """Measures each update of a Trainer."""

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer

    def on_step_begin(self, *event: Any, **state: Any) -> None:
        self._timer.begin()

    def on_step_end(self, *event: Any, **state: Any) -> None:
        self._timer.end()


def with_labels(blocks: Any) -> Any:
    return blocks.map(lambda row: {"labels": row["input_ids"]})


def history(state: TrainerState) -> History:
    """Return Trainer's log in the form of this recipe's own."""
    entries: History = []
    for entry in state.log_history:
        kept = {name: entry[name] for name in ("loss", "learning_rate", "eval_loss") if name in entry}
        if "eval_loss" in kept:
            kept["perplexity"] = math.exp(kept["eval_loss"])
        if kept:
            entries.append({"update": entry["step"], **kept})
    return entries
