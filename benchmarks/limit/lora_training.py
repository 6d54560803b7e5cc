"""The process of one kind of LoRA training: it loads the base under the limit, and trains a few steps."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.limit.lora_kinds import KINDS, Kind
from hf_memopt import StreamedWeights
from hf_memopt.disk.digests import weights_sha256
from hf_memopt.recipes.memory_limit.reported_steps import report_steps


class Training:
    """A training whose first step loads the model."""

    def __init__(self, base: str, kind: Kind, num_tokens: int, budget_gib: float) -> None:
        self._base, self._kind, self._num_tokens = base, kind, num_tokens
        self._budget_gib = budget_gib if kind.has_budget else None
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
        self._read_bytes.append(read_bytes())
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


def read_bytes() -> int:
    """Return how many bytes the disks have sent to this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "settings", type=json.loads, help="JSON of the kind, the number of steps, and arguments of `Training`"
    )
    parser.add_argument("--events", type=int, required=True, help="descriptor of the pipe for events")
    options = parser.parse_args()
    kind, num_steps = KINDS[options.settings.pop("kind")], options.settings.pop("num_steps")
    training = Training(kind=kind, **options.settings)
    return report_steps(training.step, num_steps, options.events, training.results)


if __name__ == "__main__":
    sys.exit(main())
