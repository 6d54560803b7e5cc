"""Full fine-tuning of a Llama, by kind of its optimizer's state."""

import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.limit.kinds import SharedMappings
from hf_memopt import OffloadedOptimizer
from hf_memopt.disk.digests import weights_sha256

MICRO_BATCHES, MAX_NORM = 2, 0.5


def mapped_state(weights: list[Tensor], folder: Path) -> Optimizer:
    """Make an AdamW with its state in shared mappings of files, which the system writes back and reads again."""
    optimizer, mappings = AdamW(weights), SharedMappings(folder)
    for weight in weights:
        optimizer.state[weight] = {"step": torch.tensor(0.0)}
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[weight][name] = mappings.empty_like(weight)
    return optimizer


PLAIN, NO_STATE = "plain", "SGD, no state"
KINDS: dict[str, Callable[[list[Tensor], Path], Optimizer]] = {
    PLAIN: lambda weights, folder: AdamW(weights),
    "mapped": mapped_state,
    "ours, host": lambda weights, folder: OffloadedOptimizer(AdamW(weights)),
    "ours, file": lambda weights, folder: OffloadedOptimizer(AdamW(weights), home="file", disk=folder),
    NO_STATE: lambda weights, folder: SGD(weights),
}


class Training:
    """Updates after clipping, each of several micro-batches of one sequence, at a rate that falls to zero."""

    def __init__(self, model: dict[str, int], num_tokens: int, kind: str, num_steps: int, folder: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup  # seconds

        torch.manual_seed(0)
        config = LlamaConfig(**model, tie_word_embeddings=False, use_cache=False)
        self._model, self._tokens = LlamaForCausalLM(config).train(), (config.vocab_size, (1, num_tokens))
        self._optimizer = KINDS[kind](list(self._model.parameters()), Path(folder))
        self._schedule = get_linear_schedule_with_warmup(self._optimizer, 0, num_steps)
        self._counters = psutil.Process().io_counters
        self._read_before = self._counters().read_bytes

    def step(self) -> float:
        losses = []
        for _ in range(MICRO_BATCHES):
            tokens = torch.randint(*self._tokens)
            loss = self._model(input_ids=tokens, labels=tokens).loss
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return statistics.fmean(losses)

    def results(self) -> dict[str, Any]:
        num_read, optimizer = self._counters().read_bytes - self._read_before, self._optimizer
        states = optimizer.state_dict()["state"].items()
        state = {f"{number} {name}": each for number, of in states for name, each in of.items() if each is not None}
        return {
            "read_bytes": num_read,
            "weights_digest": weights_sha256(self._model),
            "state_digest": weights_sha256(nn.ParameterDict(state)),
            "report": asdict(optimizer.report()) if isinstance(optimizer, OffloadedOptimizer) else None,
        }
