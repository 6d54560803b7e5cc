"""Fine-tune a model on conversations with TRL's SFTTrainer, within the memory at hand.

    accelerate launch --cpu -m hf_memopt.recipes.train_sft --lora_rank 8 --max_steps 40 --cpu_copies
    accelerate launch -m hf_memopt.recipes.train_sft --model Qwen/Qwen3-8B --dataset trl-lib/Capybara \\
        --dtype bfloat16 --lora_rank 16 --quantize nf4 --max_length 4096 --per_device_train_batch_size 16 --plan auto

Rows of `messages` teach the assistant's words alone, rows of `prompt` and `completion` the completion. Without --model
and --dataset a tiny model learns small sums on a CPU in half a minute, and nothing is downloaded.

Flags are those below, TRL's SFTConfig and MemoptArguments; --config FILE reads any of them from YAML. --plan chooses
micro-batch, checkpointing and offloading by simulation, for the same conversations per update.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer, Trainer, set_seed

from hf_memopt.callbacks import StopOnNonFiniteCallback
from hf_memopt.command_line import one_line_errors, script_imports
from hf_memopt.datasets_by_name import dataset_by_name
from hf_memopt.planning.models.adapters import cast_trained
from hf_memopt.recipes.common.auto_plan import log_prediction
from hf_memopt.recipes.common.flags import explained
from hf_memopt.recipes.common.loop import reporting, writing_to

with script_imports("train_sft", __name__):
    from peft import get_peft_model
    from trl import SFTTrainer, get_peft_config
    from trl.chat_template_utils import get_training_chat_template

    from hf_memopt.recipes.sft.model import as_prompts, load_model, make_conversations, write_tiny_model
    from hf_memopt.recipes.sft.options import Options, check_folder, parse
    from hf_memopt.recipes.sft.workload import apply_plan

logger = logging.getLogger("hf_memopt.recipes.train_sft")


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    options = parse(__doc__, arguments)
    sft, about, training, memopt = options
    resumed = check_folder(options)
    process = PartialState()
    with writing_to(training.output_dir, process):
        name_model(options, process)
        with explained(f"model={about.model_name_or_path!r} cannot be loaded; pass a hub id or folder of a causal LM"):
            tokenizer = AutoTokenizer.from_pretrained(about.model_name_or_path, trust_remote_code=False)
        with process.main_process_first():  # the others find the dataset in the cache
            rows = read_rows(options, tokenizer)
        # With --plan, micro-batch and memory flags are chosen by simulation; everything after sees the chosen ones.
        predicted = apply_plan(options)
        set_seed(training.seed)
        model, adapters = load_model(options), get_peft_config(about)
        if memopt.base != "off":  # hf_memopt: before the trainer moves all weights to the device
            model, adapters = model if adapters is None else get_peft_model(model, adapters), None
            memopt.stream_base(model, training)
        trainer = SFTTrainer(model, training, train_dataset=rows, processing_class=tokenizer, peft_config=adapters)
        if sft.adapters_dtype is not None and about.use_peft:
            cast_trained(trainer.model, getattr(torch, sft.adapters_dtype))
        memopt.attach(trainer)  # hf_memopt: offloading, memory in the log, a report where memory runs out
        if not trainer.is_deepspeed_enabled:  # whose engine updates before Trainer could stop it
            trainer.add_callback(StopOnNonFiniteCallback())  # hf_memopt
        announce(trainer, options)
        trainer.train(resume_from_checkpoint=resumed)
        if trainer.is_fsdp_enabled:  # else the model would be left in shards alone
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model()
        trainer.save_state()
        with reporting(training.output_dir):
            log_prediction(predicted, trainer.accelerator)
            trainer.create_model_card(Path(training.output_dir).name, dataset_name=sft.dataset)
    return trainer.state.log_history


def name_model(options: Options, process: PartialState) -> None:
    if options.model.model_name_or_path is None:
        folder = Path(options.training.output_dir) / "tiny_model"
        if process.is_main_process:
            write_tiny_model(folder, options.training.seed)
        process.wait_for_everyone()
        options.model.model_name_or_path = str(folder)


def read_rows(options: Options, tokenizer: Any) -> Dataset:
    """Return the conversations, and put the loss on the assistant's words where they can be marked."""
    name, split = options.sft.dataset, options.sft.split
    if name is None:
        rows = make_conversations(512, options.training.seed)
        rows = as_prompts(rows) if tokenizer.chat_template is None else rows
    else:
        rows = dataset_by_name(name, split)
    columns = set(rows.column_names)
    if not (columns >= {"messages"} or columns >= {"prompt", "completion"}):
        raise ValueError(
            f"dataset={name!r} has the columns {', '.join(rows.column_names)}; rows need `messages`, or `prompt` and "
            "`completion`"
        )
    training = options.training
    if "messages" not in columns:  # of completions TRL masks the prompt by itself, and refuses this flag
        training.assistant_only_loss = False
    elif training.assistant_only_loss is None:
        training.assistant_only_loss = marks_answers(tokenizer)
    return rows


def marks_answers(tokenizer: Any) -> bool:
    """Return whether the model's chat template marks the assistant's words, or TRL has one that does."""
    try:
        get_training_chat_template(tokenizer)
    except ValueError:
        logger.warning("TRL cannot mark the assistant's words in this model's chat template: all words are learnt")
        return False
    return True


def announce(trainer: Trainer, options: Options) -> None:
    counts = [(each.numel(), each.requires_grad) for each in trainer.model.parameters()]
    trained, total = sum(count for count, learns in counts if learns), sum(count for count, _ in counts)
    logger.info(
        f"Model: {trained:,} of {total:,} stored parameters learn on {trainer.args.device}; "
        f"{len(trainer.train_dataset):,} rows; activation offloading: {options.memopt.offload}"
    )


if __name__ == "__main__":
    sys.exit(one_line_errors("train_sft", main))
