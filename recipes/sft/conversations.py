"""Conversations about small numbers, and a tiny model that speaks their words: nothing is downloaded."""

from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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
