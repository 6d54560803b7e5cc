"""A trainer as a file of arguments describes it, of a model without memory, on tokens that are all the same."""

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import Trainer

from hf_memopt.estimate.simulation.quantised.quantised_base import adapt_as_peft_does, quantise
from hf_memopt.integrations.transformers.argument_file import ArgumentFile
from hf_memopt.integrations.transformers.trl_trainers import END, WORD, Rows
from hf_memopt.jobs.quiet import quiet, refused_by
from hf_memopt.jobs.transformers_models.published_weights import PublishedWeights, published_weights
from hf_memopt.jobs.transformers_models.tasks import TASKS

_PADDING = "<pad>"
# transformers' marks of models that are stored in few bits.
_STORED = {"nf4": "is_loaded_in_4bit", "nf4-double": "is_loaded_in_4bit", "int8": "is_loaded_in_8bit"}


@quiet()
def make_trainer(
    file: ArgumentFile, config: Any, task: str, changes: Mapping[str, Any], seq_len: int, output_dir: str
) -> Trainer:
    arguments = file.training_arguments(changes, output_dir)
    about = file.model_fields(changes)
    adapters = _adapters(about) if about["use_peft"] else None
    build = partial(_base_model, config, task, about)
    with refused_by(file.trainer_name):
        if file.trainer is None:
            trainer = _plain_trainer(build(), arguments, seq_len, adapters)
        else:
            data = file.trainer.rows(arguments, seq_len, num_samples(arguments))
            trainer = _trl_trainer(file.trainer.kind, build, storage(about, config), arguments, data, adapters)
    adapt_as_peft_does(trainer.model)
    return trainer


def _base_model(config: Any, task: str, about: Mapping[str, Any]) -> Any:
    name = about["dtype"] or "float32"
    dtype = (config.dtype or torch.float32) if name == "auto" else getattr(torch, name)
    # A trainer writes into its model's configuration.
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model: Any = TASKS[task].build(
            config, f"model={about['model_name_or_path']!r}", dtype=dtype, attn_implementation=attention(about)
        )
        stored = storage(about, config)
        if stored is not None:
            published = _published(about, config)
            quantise(model, stored, getattr(torch, published.compute_dtype or "", dtype), kept=published.kept)
    return model


def storage(about: Mapping[str, Any], config: Any) -> str | None:
    """Return how linear layers are stored: as the checkpoint was published, or else as the fields ask for."""
    published = _published(about, config).quantize
    if published != "none":
        return published
    if about["load_in_4bit"]:
        return "nf4-double" if about["use_bnb_nested_quant"] else "nf4"
    return "int8" if about["load_in_8bit"] else None


def _published(about: Mapping[str, Any], config: Any) -> PublishedWeights:
    return published_weights(config, f"model={about['model_name_or_path']!r}")


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


def _trl_trainer(
    kind: Any, build: Callable[[], Any], stored: str | None, arguments: Any, data: Rows, adapters: Any
) -> Trainer:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    model = build()
    options: dict[str, Any] = {"peft_config": adapters, "processing_class": _tokenizer()}
    if hasattr(arguments, "num_generations"):
        options |= {"reward_funcs": _no_reward}
    if stored is not None:
        # TRL asks these; later they would make transformers ask bitsandbytes.
        setattr(model, _STORED[stored], True)
    # A trainer that generates on a server would ask the server when it is made.
    is_served = bool(getattr(arguments, "use_vllm", False))
    with patch.object(arguments, "use_vllm", False) if is_served else nullcontext(), _reference_of(kind, build):
        trainer: Any = kind(model, args=arguments, train_dataset=Dataset.from_dict(data), **options)
    if is_served:
        trainer.use_vllm = True
    if stored is not None:
        delattr(model, _STORED[stored])
    return trainer


def num_samples(arguments: Any) -> int:
    """Return the samples of the most passes that are simulated, or of one generation."""
    return int(arguments.per_device_train_batch_size * min(2, arguments.gradient_accumulation_steps))


@contextmanager
def _reference_of(kind: Any, build: Callable[[], Any]) -> Iterator[None]:
    """Build the reference model, if a trainer asks for one, where it would load the model's weights and move them."""
    made: list[Any] = []

    def create(path: str, **options: Any) -> Any:
        made.append(build().requires_grad_(False))
        made[-1].to = lambda *args, **options: made[-1]
        return made[-1]

    with patch.object(importlib.import_module(kind.__module__), "create_model_from_path", create, create=True):
        yield
    for model in made:
        del model.to


def _no_reward(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def _plain_trainer(model: nn.Module, arguments: Any, seq_len: int, adapters: Any) -> Trainer:
    if adapters is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapters)
    tokens = torch.zeros(seq_len, dtype=torch.long)
    samples = [{"input_ids": tokens, "labels": tokens}] * num_samples(arguments)
    return Trainer(model, arguments, train_dataset=samples)


def _tokenizer() -> Any:
    """Return a tokenizer with one word, and with the marks that TRL asks for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({_PADDING: 0, END: 1, WORD: 2}, unk_token=_PADDING))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=_PADDING, eos_token=END)
