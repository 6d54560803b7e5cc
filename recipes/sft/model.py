"""The models of `train_sft.py`: a tiny one with conversations about small numbers, and the one that is fine-tuned."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Mxfp4Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TorchAoConfig,
)
from trl import get_quantization_config

from hf_memopt.planning.models.adapters import freeze_first_layers
from hf_memopt.planning.models.hub_code import check_model
from hf_memopt.recipes.common.flags import explained
from hf_memopt.recipes.sft.options import Options

NUM_NUMBERS = 30
_WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", "what", "is", "plus", "follows", "?", "."]
# The markers tell TRL which words are the assistant's; a space inside them, at the end, would hide where they end.
_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<assistant> ' }}"
    "{% generation %}{{ message.content + ' <eos>' }}{% endgeneration %}{{ ' ' }}"
    "{% else %}{{ '<user> ' + message.content + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def make_conversations(count: int, seed: int) -> Dataset:
    """Return rows of `messages`: two questions, each with its answer, about numbers below `NUM_NUMBERS`."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(NUM_NUMBERS // 2, (count, 3), generator=generator).tolist()
    rows = []
    for first, second, third in numbers:
        turns = [
            ("user", f"what is {first} plus {second} ?"),
            ("assistant", f"{first} plus {second} is {first + second} ."),
            ("user", f"what follows {third} ?"),
            ("assistant", f"{third + 1} follows {third} ."),
        ]
        rows.append([{"role": role, "content": content} for role, content in turns])
    return Dataset.from_dict({"messages": rows})


def as_prompts(conversations: Dataset) -> Dataset:
    """Return each conversation's first turn as `prompt` and `completion`, for models without a chat template."""
    turns = [row[:2] for row in conversations["messages"]]
    rows = [{"prompt": question["content"], "completion": f" {answer['content']}"} for question, answer in turns]
    return Dataset.from_list(rows)


def write_tiny_model(folder: Path, seed: int) -> str:
    """Write a Qwen3 of about 70,000 parameters and its tokenizer, a word at a time; return the folder's name."""
    words = [*_WORDS, *map(str, range(NUM_NUMBERS))]
    by_word = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="."))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = _TEMPLATE
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.1,  # so that a frozen output layer tells words apart
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def load_model(options: Options) -> PreTrainedModel:
    about = options.model
    quantization = _quantization(options)
    with explained(f"model={about.model_name_or_path!r} cannot be loaded; pass a hub id or folder of a causal LM"):
        check_model(str(about.model_name_or_path))
        quantization = quantization or dequantization(str(about.model_name_or_path))
        model = AutoModelForCausalLM.from_pretrained(
            about.model_name_or_path,
            dtype=about.dtype if about.dtype in ("auto", None) else getattr(torch, about.dtype),
            quantization_config=quantization,
            attn_implementation=about.attn_implementation,
            trust_remote_code=False,
        )
    model.config.use_cache = False
    if options.sft.freeze_layers is not None:
        freeze_first_layers(model, options.sft.freeze_layers)
    return model


def dequantization(model: str) -> Any:
    """Return the way to load a checkpoint in MXFP4, which transformers does not train, or None for others."""
    published = getattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "quantization_config", None) or {}
    return Mxfp4Config(dequantize=True) if published.get("quant_method") == "mxfp4" else None


def _quantization(options: Options) -> Any:
    if not options.is_quantised:
        return None
    library = "torchao" if options.sft.quantize else "bitsandbytes"
    if importlib.util.find_spec(library) is None:
        raise ValueError(f"weights in few bits by {library} need it: pip install {library}")
    if options.sft.quantize:
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    about = options.model
    # The same bits, in a form that FSDP2 and ZeRO-3 divide.
    return get_quantization_config(replace(about, bnb_4bit_quant_storage=about.bnb_4bit_quant_storage or about.dtype))
