"""A tiny decoder and trainers of it, with and without activation offloading."""

import functools
from typing import Any

import torch
import transformers
from late_imports import LateModule
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, SyncCopier

callbacks = LateModule("hf_memopt.callbacks")
trainer_toys = LateModule("trainer_toys")

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "attention_dropout": 0.1,
}


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


# 6 steps of 2 micro-batches, an evaluation after every second; quiet.
STEPS: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "no",
    "logging_steps": 2,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
}


HOWS = ["attach", "callback"]


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE))


@functools.cache
def examples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (16,), generator=generator) for _ in range(32)]
    return [{"input_ids": row, "labels": row} for row in rows]


def everything(copier: Any = None, **options: Any) -> ActivationOffloader:
    return ActivationOffloader(
        **{"mode": "all", "offload_threshold_mb": 0, "copier": copier or SyncCopier(), **options}
    )


def switch_on(how: str, trainer: Any, offloader: ActivationOffloader) -> None:
    if how == "attach":
        callbacks.attach(trainer, offloader=offloader)
    elif how == "callback":
        trainer.add_callback(callbacks.ActivationOffloadCallback(offloader))


def weights(trainer: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def packed(offloader: ActivationOffloader) -> int:
    return offloader.stats.bytes_moved + offloader.stats.bytes_kept


def run(make: Any, how: str, offloader: ActivationOffloader, **options: Any) -> tuple[list[Tensor], list[list[int]]]:
    generating = trainer_toys.GenerateAtEvaluation()
    trainer = make(callbacks=[generating], **options)
    switch_on(how, trainer, offloader)
    trainer.train()
    return weights(trainer), generating.generated
