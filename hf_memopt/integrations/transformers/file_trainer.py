"""A trainer as a file of arguments describes it, of a model without memory, on tokens that are all the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_memopt.estimate.simulation.quantised_base import copy_before_adding, quantise_nf4
from hf_memopt.integrations.transformers.argument_file import ArgumentFile
from hf_memopt.tuning.model_config import building

_PADDING, _END = "<pad>", "</s>"


def make_trainer(
    file: ArgumentFile,
    config: Any,
    auto_class: Any,
    changes: Mapping[str, Any],
    seq_len: int,
    output_dir: str,
) -> Trainer:
    """Return a Trainer, or TRL's SFTTrainer, for `trainer_step`.

    Args:
        file: says how it trains.
        config: of the model.
        auto_class: of transformers, such as AutoModelForCausalLM.
        changes: fields that have other values than in the file.
        seq_len: tokens of each sample.
        output_dir: an empty folder.

    Raises:
        ValueError: a field or its value is not simulated, or the model cannot be made.
    """
    arguments = file.training_arguments(changes, output_dir)
    about = file.model_fields(changes)
    model = _base_model(config, auto_class, about)
    rows = [[0] * seq_len] * (arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps)
    adapters = _adapters(about) if about["use_peft"] else None
    if file.is_sft:
        trainer = _sft_trainer(model, arguments, rows, adapters, about["load_in_4bit"])
    else:
        trainer = _plain_trainer(model, arguments, rows, adapters)
    copy_before_adding(trainer.model)
    return trainer


def _base_model(config: Any, auto_class: Any, about: Mapping[str, Any]) -> Any:
    dtype = torch.float32 if about["dtype"] is None else about["dtype"]
    dtype = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."))
    with building(f"model={about['model_name_or_path']!r}"), torch.device("meta"):
        model = auto_class.from_config(
            config, dtype=dtype, attn_implementation=attention(about), trust_remote_code=False
        )
        if about["load_in_4bit"]:
            kept = {name: weight.dtype for name, weight in model.named_parameters()}
            quantise_nf4(model, dtype)
            # TRL does not prepare the model by PEFT, which would make the other weights float32.
            for name, weight in model.named_parameters():
                weight.data = weight.data.to(kept[name]) if weight.is_floating_point() else weight.data
    return model


def attention(about: Mapping[str, Any]) -> str | None:
    """Return the implementation that is simulated: kernels that are not here hold what torch's flash attention does."""
    asked = about["attn_implementation"]
    return asked if asked in (None, "eager", "sdpa") else "sdpa"


def _adapters(about: Mapping[str, Any]) -> Any:
    """Return what TRL's `get_peft_config` does."""
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


def _sft_trainer(
    model: Any, arguments: Any, rows: list[list[int]], adapters: Any, is_in_4_bits: bool
) -> Trainer:
    from datasets import Dataset, disable_progress_bars
    from trl import SFTTrainer

    disable_progress_bars()
    data = {"train_dataset": Dataset.from_dict({"input_ids": rows}), "processing_class": _tokenizer()}
    # TRL asks for this where it makes adapters, which it makes bfloat16 then; later transformers asks bitsandbytes.
    model.is_loaded_in_4bit = is_in_4_bits
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
    """Return one that TRL asks for special words; the samples are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({_PADDING: 0, _END: 1}, unk_token=_PADDING))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=_PADDING, eos_token=_END)
