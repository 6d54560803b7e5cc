"""A tiny model, tokenizer and data, made on the spot, for the scripts and functions that are compared."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(254))]
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
NUM_SAMPLES, SHORTEST, LONGEST = 32, 8, 48
WIDTH = 64
# TRL's configs switch bfloat16 and checkpointing on by themselves.
TRL_SETTINGS: dict[str, Any] = {
    "max_steps": 8,
    "learning_rate": 1e-3,
    "max_length": None,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "disable_tqdm": True,
}


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(nn.functional.gelu(self.up(self.norm(x)))))


def blocks(dropout: float = 0.0) -> nn.Sequential:
    set_seed(0)
    return nn.Sequential(*(Block(dropout) for _ in range(3)))


def llama(dropout: float = 0.0, attention: str = "sdpa") -> LlamaForCausalLM:
    set_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = LlamaConfig(vocab_size=len(WORDS), attention_dropout=dropout, **special, **SHAPE)
    config._attn_implementation = attention
    return LlamaForCausalLM(config).train()


def tokenizer() -> PreTrainedTokenizerFast:
    by_word = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="<pad>", eos_token="<eos>")


def samples() -> list[Tensor]:
    """Return sequences of tokens of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (NUM_SAMPLES,), generator=generator)
    return [torch.randint(2, len(WORDS), (length,), generator=generator) for length in lengths.tolist()]


def texts() -> list[str]:
    return [" ".join(WORDS[token] for token in sample) for sample in samples()]


def padded(sequences: list[Tensor]) -> dict[str, Tensor]:
    """Return a batch, padded behind; padding has no label."""
    labels = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels >= 0).long(), "labels": labels}


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return padded([row["input_ids"] for row in rows])
