"""A trainer as a file of arguments describes it, of a model without memory, on tokens that are all the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_memopt.estimate.simulation.quantised.quantised_base import adapt_as_peft_does, quantise
from hf_memopt.integrations.transformers.argument_file import ArgumentFile
from hf_memopt.jobs.transformers_models.tasks import TASKS

_PADDING, _END = "<pad>", "</s>"


def make_trainer(
    file: ArgumentFile, config: Any, task: str, changes: Mapping[str, Any], seq_len: int, output_dir: str
) -> Trainer:
    arguments = file.training_arguments(changes, output_dir)
    about = file.model_fields(changes)
    model = _base_model(config, task, about)
    rows = [[0] * seq_len] * (arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps)
    adapters = _adapters(about) if about["use_peft"] else None
    if file.is_sft:
        trainer = _sft_trainer(model, arguments, rows, adapters, is_quantised=storage(about) is not None)
    else:
        trainer = _plain_trainer(model, arguments, rows, adapters)
    adapt_as_peft_does(trainer.model)
    return trainer


def _base_model(config: Any, task: str, about: Mapping[str, Any]) -> Any:
    name = about["dtype"] or "float32"
    dtype = (config.dtype or torch.float32) if name == "auto" else getattr(torch, name)
    with torch.device("meta"):
        model: Any = TASKS[task].build(
            config, f"model={about['model_name_or_path']!r}", dtype=dtype, attn_implementation=attention(about)
        )
        stored = storage(about)
        if stored is not None:
            kept = {name: weight.dtype for name, weight in model.named_parameters()}
            quantise(model, stored, dtype)
            # TRL does not prepare the model by PEFT, which would make the other weights float32.
            for name, weight in model.named_parameters():
                if weight.is_floating_point():
                    weight.data = weight.data.to(kept[name])
    return model


def storage(about: Mapping[str, Any]) -> str | None:
    return "nf4" if about["load_in_4bit"] else "int8" if about["load_in_8bit"] else None


def attention(about: Mapping[str, Any]) -> str | None:
    """Return the simulated kernel; those that are not here hold as much as torch's flash attention."""
    asked = about["attn_implementation"]
    return asked if asked in (None, "eager", "sdpa") else "sdpa"


def _adapters(about: Mapping[str, Any]) -> Any:
    """Do as TRL's `get_peft_config`."""
    from peft import LoraConfig

    optional = {"target_parameters": about["lora_target_parameters"]} if about["lora_target_parameters"] else {}
    return LoraConfig(
        task_type=about["lora_task_type"],
        r=about["lora_r"],
        target_modules=about["lora_target_modules"],
        lora_alpha=about["lora_alpha"],
        lora_dropout=about["lora_dropout"],
        bias="none",
        use_rslora=about["use_rslora"],
        use_dora=about["use_dora"],
        modules_to_save=about["lora_modules_to_save"],
        **optional,
    )


def _sft_trainer(model: Any, arguments: Any, rows: list[list[int]], adapters: Any, is_quantised: bool) -> Trainer:
    from datasets import Dataset, disable_progress_bars
    from trl import SFTTrainer

    disable_progress_bars()
    data = {"train_dataset": Dataset.from_dict({"input_ids": rows}), "processing_class": _tokenizer()}
    # TRL makes adapters bfloat16 by it; later it would make transformers ask bitsandbytes.
    model.is_loaded_in_4bit = is_quantised
    trainer: Trainer = SFTTrainer(model, arguments, peft_config=adapters, **data)
    del model.is_loaded_in_4bit
    return trainer


def _plain_trainer(model: nn.Module, arguments: Any, rows: list[list[int]], adapters: Any) -> Trainer:
    if adapters is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapters)
    tokens = [torch.tensor(row) for row in rows]
    return Trainer(model, arguments, train_dataset=[{"input_ids": each, "labels": each} for each in tokens])


def _tokenizer() -> Any:
    """Return a tokenizer for TRL's special words; the samples are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({_PADDING: 0, _END: 1}, unk_token=_PADDING))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=_PADDING, eos_token=_END)
