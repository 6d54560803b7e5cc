"""A tiny decoder and trainers of it, with and without activation offloading."""

import functools
from typing import Any

import torch
from late_imports import LateModule
from tiny_decoders import tiny_decoder
from torch import Tensor, nn

from hf_memopt import ActivationOffloader, SyncCopier

callbacks = LateModule("hf_memopt.callbacks")
trainer_toys = LateModule("trainer_toys")

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
    return tiny_decoder(attention_dropout=0.1)


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


def packed(offloader: ActivationOffloader) -> int:
    return offloader.stats.bytes_moved + offloader.stats.bytes_kept


def run(make: Any, how: str, offloader: ActivationOffloader, **options: Any) -> tuple[list[Tensor], list[list[int]]]:
    generating = trainer_toys.GenerateAtEvaluation()
    trainer = make(callbacks=[generating], **options)
    switch_on(how, trainer, offloader)
    trainer.train()
    return weights(trainer), generating.generated
