"""Full fine-tuning of weights in files, of one kind, which loads them in its first step, under the limit."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim import AdamW
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.limit.full_training import Updates, mapped_state
from benchmarks.limit.kinds import SharedMappings
from benchmarks.limit.limited import drop_cached
from benchmarks.limit.trained_weights import KINDS, Kind
from hf_memopt import OffloadedOptimizer, StreamedWeights


class Training:
    """Updates, before the first of which the model is loaded."""

    def __init__(self, base: str, num_tokens: int, kind: str, num_steps: int, folder: str) -> None:
        self._base, self._folder = Path(base), Path(folder)
        self._sizes = {"num_tokens": num_tokens, "num_steps": num_steps}
        self._updates: Updates | None = None
        self._make = _maker(KINDS[kind])
        drop_cached(self._base)

    def step(self) -> float:
        if self._updates is None:
            self._updates = self._make(self._base, self._folder, **self._sizes)
        return self._updates.step()

    def results(self) -> dict[str, Any]:
        assert self._updates is not None
        return self._updates.results()


def _maker(kind: Kind) -> Callable[..., Updates]:
    """Return the function that loads weights and makes their updates."""
    if kind.home == "DeepSpeed":
        os.environ["DS_ACCELERATOR"] = "cpu"
        from benchmarks.limit import deepspeed_updates  # which the other kinds do without

        deepspeed_updates.start()
        return deepspeed_updates.DeepSpeedUpdates

    def make(base: Path, folder: Path, **sizes: int) -> Updates:
        model = LlamaForCausalLM.from_pretrained(base).train()
        if kind.is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if kind.home == "ours":
            return streamed(model, folder, kind.budget_gib, **sizes)
        return _MAKERS[kind.home](model, folder, **sizes)

    return make


def plain(model: PreTrainedModel, folder: Path, **sizes: int) -> Updates:
    return Updates(model, AdamW(model.parameters()), **sizes)


def mapped(model: PreTrainedModel, folder: Path, **sizes: int) -> Updates:
    """Put weights, gradients and state into shared mappings; the first micro-batch adds to zeros."""
    mappings = SharedMappings(folder)
    for weight in model.parameters():
        weight.data = mappings.empty_like(weight).copy_(weight.data)
        weight.grad = mappings.empty_like(weight)
    return Updates(model, mapped_state(list(model.parameters()), folder), **sizes, set_to_none=False)


def state_in_file(model: PreTrainedModel, folder: Path, **sizes: int) -> Updates:
    return Updates(model, OffloadedOptimizer(AdamW(model.parameters()), home="file", disk=folder), **sizes)


def streamed(model: PreTrainedModel, folder: Path, budget_gib: float | None, **sizes: int) -> Updates:
    weights = StreamedWeights(model, home="file", trained=True, budget_gib=budget_gib, device="cpu", disk=folder)
    optimizer = weights.adopt(AdamW(model.parameters()))
    return Updates(model, optimizer, **sizes, stream=weights.stream, visit=weights.visit)


_MAKERS: dict[str, Callable[..., Updates]] = {"memory": plain, "mappings": mapped, "state": state_in_file}
