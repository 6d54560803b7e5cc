"""A tiny decoder and trainers of it, with and without activation offloading."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.callbacks import ActivationOffloadCallback, attach

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


HOWS = ["attach", "callback"]


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE))


@functools.cache
def examples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (16,), generator=generator) for _ in range(32)]
    return [{"input_ids": row, "labels": row} for row in rows]


def everything(copier: Any = None, **options: Any) -> ActivationOffloader:
    return ActivationOffloader(
        **{"mode": "all", "offload_threshold_mb": 0, "copier": copier or SyncCopier(), **options}
    )


def switch_on(how: str, trainer: Trainer, offloader: ActivationOffloader) -> None:
    if how == "attach":
        attach(trainer, offloader=offloader)
    elif how == "callback":
        trainer.add_callback(ActivationOffloadCallback(offloader))


def weights(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def packed(offloader: ActivationOffloader) -> int:
    return offloader.stats.bytes_moved + offloader.stats.bytes_kept


class GenerateAtEvaluation(TrainerCallback):
    def __init__(self) -> None:
        self.generated: list[list[int]] = []

    def on_evaluate(self, *event: Any, model: Any, **kwargs: Any) -> None:
        prompt = examples()[0]["input_ids"][None, :4]
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
        self.generated.append(output[0].tolist())


def run(make: Any, how: str, offloader: ActivationOffloader, **options: Any) -> tuple[list[Tensor], list[list[int]]]:
    generating = GenerateAtEvaluation()
    trainer = make(callbacks=[generating], **options)
    switch_on(how, trainer, offloader)
    trainer.train()
    return weights(trainer), generating.generated
