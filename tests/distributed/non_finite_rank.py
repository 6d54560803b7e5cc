"""Trainer with a NaN gradient on rank 1 alone, in step 3's second batch, for test_non_finite_two_processes.py."""

from typing import Any

import torch
from accelerators import engines_on_the_cpu
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_memopt.callbacks.stop_on_non_finite import NonFiniteGradientError, StopOnNonFiniteCallback

BAD_FORWARD = 2 * 2 + 1


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)
        self.num_forwards = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        if self.num_forwards == BAD_FORWARD and torch.distributed.get_rank() == 1:
            hidden.register_hook(lambda gradient: gradient * float("nan"))
        self.num_forwards += 1
        prediction = self.last(hidden)
        return {"loss": (prediction - labels).square().mean(), "logits": prediction}


class Snapshot(TrainerCallback):
    def __init__(self) -> None:
        self.parameters: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        self.parameters = parameters(model)


def parameters(model: nn.Module) -> list[float]:
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return torch.cat([parameter.detach().flatten() for parameter in whole]).tolist()


def stopped(folder: str, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(64)]
    arguments = TrainingArguments(
        folder,
        max_steps=6,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        **settings,
    )
    snapshot = Snapshot()
    trainer = Trainer(Regression(), arguments, train_dataset=data, callbacks=[snapshot, StopOnNonFiniteCallback()])
    try:
        trainer.train()
        message = "no error"
    except NonFiniteGradientError as error:
        message = str(error)
    kind = FSDPModule if "fsdp" in settings else DistributedDataParallel
    assert isinstance(trainer.model_wrapped, kind)
    return {"message": message, "before": snapshot.parameters, "after": parameters(trainer.model)}


def outcomes(folder: str) -> dict[str, Any]:
    """Return by engine the message, and the parameters before and after."""
    results = {"ddp": stopped(folder, use_cpu=True)}
    with engines_on_the_cpu():
        blocks = {"version": 2, "transformer_layer_cls_to_wrap": ["Linear"]}
        results["fsdp2"] = stopped(folder, fsdp="full_shard auto_wrap", fsdp_config=blocks)
    return results
