"""Full fine-tuning of a Llama, by kind of its optimizer's state, and updates of any kind."""

import hashlib
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.limit.kinds import SharedMappings
from hf_memopt import OffloadedOptimizer
from hf_memopt.disk.files_on_disk import weights_sha256

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


class Updates:
    """Updates after clipping, each of several micro-batches of one sequence, at a rate that falls to zero.

    Args:
        stream: around a forward pass.
        visit: around uses of a module's weights.
        set_to_none: whether gradients are freed between updates.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        num_tokens: int,
        num_steps: int,
        stream: Callable[[], AbstractContextManager[None]] = nullcontext,
        visit: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
        set_to_none: bool = True,
    ) -> None:
        from transformers import get_linear_schedule_with_warmup  # seconds

        self._model = self._forward = model
        self._tokens = (model.config.vocab_size, (1, num_tokens))
        self._optimizer, self._set_to_none = optimizer, set_to_none
        self._stream, self._visit = stream, visit
        self._schedule = get_linear_schedule_with_warmup(optimizer, 0, num_steps)
        self._counters = psutil.Process().io_counters
        self._read_before = self._counters().read_bytes
        torch.manual_seed(0)

    def step(self) -> float:
        losses = []
        for _ in range(MICRO_BATCHES):
            tokens = torch.randint(*self._tokens)
            with self._stream():
                loss = self._forward(input_ids=tokens, labels=tokens).loss
            self._backward(loss)
            losses.append(loss.item())
        self._update()
        return statistics.fmean(losses)

    def results(self) -> dict[str, Any]:
        num_read, optimizer = self._counters().read_bytes - self._read_before, self._optimizer
        report = asdict(optimizer.report()) if isinstance(optimizer, OffloadedOptimizer) else {}
        report.pop("wear", None)  # which has the folder's name
        return {
            "read_bytes": num_read,
            "weights_digest": self._weights_digest(),
            "state_digest": self._state_digest(),
            "report": report or None,
        }

    def _backward(self, loss: Tensor) -> None:
        (loss / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad(self._set_to_none)

    def _weights_digest(self) -> str:
        """Return the digest of all weights, of which a module's are in memory at a time."""
        digest = hashlib.sha256()
        for name, module in self._model.named_modules():
            if not list(module.children()):
                with self._visit(module):
                    digest.update(f"{name} {weights_sha256(module)}\n".encode())
        return digest.hexdigest()

    def _state_digest(self) -> str | None:
        states = self._optimizer.state_dict()["state"].items()
        state = {f"{number} {name}": each for number, of in states for name, each in of.items() if each is not None}
        return weights_sha256(nn.ParameterDict(state))


class Training(Updates):
    """Updates of a model that is in memory before the first one."""

    def __init__(self, model: dict[str, int], num_tokens: int, kind: str, num_steps: int, folder: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM  # seconds

        torch.manual_seed(0)
        made = LlamaForCausalLM(LlamaConfig(**model, tie_word_embeddings=False, use_cache=False)).train()
        super().__init__(made, KINDS[kind](list(made.parameters()), Path(folder)), num_tokens, num_steps)
