"""LoRA fine-tuning of a whole model of Qwen3-8B's shape, for the search for the longest sequence."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.activations.model import qwen3
from hf_memopt.training import chunked_loss

LAYERS = {"real": 36, "toy": 2}
VOCABULARY = {"real": 151_936, "toy": 512}
RANK = 16
LOSS_CHUNK = 1024  # tokens whose logits exist at a time, in every mode: more would outweigh all else


@dataclass(frozen=True)
class LoraWork:
    """A sequence of random tokens, `(1, num_tokens)`, and the next-token loss of a model with a frozen head."""

    model: nn.Module
    head: nn.Linear
    tokens: Tensor

    def loss(self) -> Tensor:
        hidden = self.model(input_ids=self.tokens).last_hidden_state[0, :-1]
        return chunked_loss(self._loss_of_chunk, hidden, self.tokens[0, 1:], chunk_size=LOSS_CHUNK)

    def _loss_of_chunk(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.head(hidden).float(), labels)

    def step(self, context: Callable[[], Any] = contextlib.nullcontext) -> None:
        """Compute the adapters' gradients. Their optimizer would take a few MB in every mode."""
        self.model.zero_grad()
        with context():
            loss = self.loss()
        loss.backward()

    def longer(self, num_tokens: int) -> "LoraWork":
        tokens = torch.randint(0, self.head.out_features, (1, num_tokens), device=self.tokens.device)
        return LoraWork(self.model, self.head, tokens)


def build(size: str, num_tokens: int, device: torch.device) -> LoraWork:
    from peft import LoraConfig, get_peft_model

    base = qwen3(size, LAYERS[size], VOCABULARY[size], device)
    with torch.device(device):
        head = nn.Linear(base.config.hidden_size, VOCABULARY[size], bias=False, dtype=torch.bfloat16).requires_grad_(
            False
        )
        model = get_peft_model(base, LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"])).train()
        tokens = torch.zeros(1, num_tokens, dtype=torch.int64)
    return LoraWork(model, head, tokens).longer(num_tokens)
