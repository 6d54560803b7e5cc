"""LoRA training of one kind, which loads the base in its first step, under the limit."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import psutil
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.limit.frozen_base import KINDS
from hf_memopt import StreamedWeights
from hf_memopt.disk.files_on_disk import weights_sha256


class Training:
    """A training whose first step loads the model."""

    def __init__(self, base: str, kind: str, num_tokens: int, budget_gib: float) -> None:
        self._base, self._kind, self._num_tokens = base, KINDS[kind], num_tokens
        self._budget_gib = budget_gib if self._kind.has_budget else None
        self._model: Any = None
        self._stream: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._streamed: StreamedWeights | None = None
        self._read_bytes: list[int] = []

    def step(self) -> float:
        if self._model is None:
            self._set_up()
        tokens = (torch.randint(self._model.config.vocab_size, (1, 1)) + torch.arange(self._num_tokens)) % 1000
        with self._stream():
            loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._read_bytes.append(psutil.Process().io_counters().read_bytes)
        return float(loss.detach())

    def results(self) -> dict[str, Any]:
        adapters = nn.ParameterDict(
            {name.replace(".", "/"): each for name, each in self._model.named_parameters() if each.requires_grad}
        )
        report = None if self._streamed is None else asdict(self._streamed.report())
        return {"adapters_digest": weights_sha256(adapters), "read_bytes_until": self._read_bytes, "report": report}

    def _set_up(self) -> None:
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.bfloat16, trust_remote_code=False)
        if self._kind.is_copied:
            for weight in base.parameters():
                weight.data = weight.data.clone()
        self._model = with_adapters(base, self._kind.is_checkpointed)
        if self._kind.is_streamed:
            self._streamed = StreamedWeights(self._model, home="file", budget_gib=self._budget_gib)
            self._stream = self._streamed.stream
        trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)


def with_adapters(base: PreTrainedModel, is_checkpointed: bool) -> nn.Module:
    base.train()
    base.config.use_cache = False
    if is_checkpointed:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM"))
