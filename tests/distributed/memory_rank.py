"""Trainer with and without MemoryLoggingCallback, whose counters say rank + 1 GiB, for test_memory_two_processes.py."""

from typing import Any

import torch
from accelerate import Accelerator
from counted_allocator import FakeCounters
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from hf_memopt.callbacks.memory_logging import MemoryLoggingCallback
from hf_memopt.memory import MemoryLogger


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        prediction = self.layer(x)
        return {"loss": (prediction - labels).square().mean(), "logits": prediction}


def make_trainer(folder: str, *callbacks: Any) -> Trainer:
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(32)]
    arguments = TrainingArguments(
        folder,
        max_steps=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    return Trainer(Regression(), arguments, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks))


def trained_weights(trainer: Trainer) -> list[float]:
    trainer.train()
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]).tolist()


def logged_by_accelerate(counters: FakeCounters) -> dict[str, float]:
    memory = MemoryLogger(Accelerator(cpu=True), log_every=1, counters=counters)
    with memory.phase(f"only_on_rank_{torch.distributed.get_rank()}"):
        counters.move(0)
    return dict(memory.log(0) or {})


def outcomes(folder: str) -> dict[str, Any]:
    plain = trained_weights(make_trainer(folder))
    rank = torch.distributed.get_rank()
    counters = FakeCounters(total_bytes=8 * 2**30)
    counters.move((rank + 1) * 2**30)
    watched = make_trainer(folder, MemoryLoggingCallback(counters=counters))
    return {
        "world_size": torch.distributed.get_world_size(),
        "plain": plain,
        "watched": trained_weights(watched),
        "history": watched.state.log_history,
        "accelerate": logged_by_accelerate(counters),
    }
