"""A Llama that learns to count."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.limit.workloads import Workload


def make(is_toy: bool) -> Workload:
    """Make one with 18 million parameters, for 2 sequences of 1,024 tokens."""
    width, num_layers, length, vocabulary = (128, 8, 1024, 256) if is_toy else (384, 10, 1024, 1024)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(length: int) -> Tensor:
        tokens = (torch.randint(vocabulary, (2, 1)) + torch.arange(length)) % vocabulary
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return Workload(model, optimizer, lambda: loss(length), lambda: loss(16), list(model.model.layers))
