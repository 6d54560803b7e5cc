"""Offloading in a small Llama under ZeRO-2 and ZeRO-3, by Accelerate and Trainer, for test_zero_two_processes.py."""

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType
from accelerate.utils import DeepSpeedPlugin
from accelerators import engines_on_the_cpu
from torch import Tensor, distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_memopt import ActivationOffloader, SyncCopier
from hf_memopt.callbacks import attach

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
BATCH, LENGTH = 2, 16
NUM_STEPS = 4  # two recorded steps, and two that follow the plan
GLOO_LETS_GO_S = 5.0  # gloo's threads keep gathered tensors a moment longer


def zero(stage: int) -> dict[str, Any]:
    """Have ZeRO-3 free all weights but the norms' after each use, by default only large ones."""
    when_freed = {
        "stage3_param_persistence_threshold": 100,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
    return {
        "zero_optimization": {"stage": stage, **when_freed},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, max_position_embeddings=32))


class GatheredWeights:
    def __init__(self, model: nn.Module) -> None:
        self._memory: list[StorageWeakRef] = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._note)

    def num_left(self) -> int:
        assert self._memory
        end = time.monotonic() + GLOO_LETS_GO_S
        while (left := sum(not memory.expired() for memory in self._memory)) and time.monotonic() < end:
            time.sleep(0.01)
        self._memory.clear()
        return left

    def _note(self, module: nn.Linear, args: Any) -> None:
        assert module.weight.shape == (module.out_features, module.in_features)
        self._memory.append(StorageWeakRef(module.weight.untyped_storage()))


def whole_weights(model: nn.Module) -> list[Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [parameter.detach().float() for parameter in model.parameters()]


def with_accelerate(folder: str, stage: int, offloader: ActivationOffloader | None) -> tuple[list[Tensor], int]:
    """Return final weights, and the most gathered weights left between a forward and its backward."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero(stage)))
    assert accelerator.distributed_type == DistributedType.DEEPSPEED
    model: Any = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    gathered, left = GatheredWeights(model), 0
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(2 * step + distributed.get_rank())
        batch = torch.randint(64, (BATCH, LENGTH), generator=generator)
        with nullcontext() if offloader is None else offloader.offload_context(model):
            loss = model(input_ids=batch, labels=batch).loss
        left = max(left, gathered.num_left() if stage == 3 else 0)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return whole_weights(model), left


def with_trainer(folder: str, stage: int, offloader: ActivationOffloader | None) -> tuple[list[Tensor], int]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(64, (LENGTH,), generator=generator) for _ in range(4 * NUM_STEPS)]
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "output_dir": folder}
    arguments = TrainingArguments(
        deepspeed=zero(stage),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
        dataloader_pin_memory=False,
        **quiet,
    )
    trainer = Trainer(llama(), arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    if offloader is not None:
        attach(trainer, offloader=offloader)
    trainer.train()
    assert trainer.accelerator.distributed_type == DistributedType.DEEPSPEED
    return whole_weights(trainer.model_wrapped), 0


def shared_inputs() -> int:
    """Count bytes that linear functions save again: inputs of keys, values, upper projection and attention's output."""
    in_each_layer = 4 * BATCH * LENGTH * SIZES["hidden_size"] * torch.bfloat16.itemsize
    return NUM_STEPS * SIZES["num_hidden_layers"] * in_each_layer


def outcomes_by_way(folder: str) -> dict[str, Any]:
    start = [parameter.detach() for parameter in llama().parameters()]
    found = {}
    for name, train in {"accelerate": with_accelerate, "trainer": with_trainer}.items():
        for stage in (2, 3):
            plain, _ = train(folder, stage, None)
            for mode in ("all", "auto"):
                offloader = ActivationOffloader(
                    mode=mode, offload_threshold_mb=0, max_slowdown=1e9, copier=SyncCopier()
                )
                weights, left = train(folder, stage, offloader)
                found[f"{name} {stage} {mode}"] = {
                    "equal": len(plain) == len(weights) and all(map(torch.equal, plain, weights)),
                    "learned": not any(map(torch.equal, plain, start)),
                    "gathered_left": left,
                    "moved": offloader.stats.bytes_moved,
                    "shared_inputs": shared_inputs(),
                    "live": offloader.stats.host_bytes_live,
                }
    return found


@contextmanager
def deepspeed_on_the_cpu() -> Iterator[None]:
    with (
        engines_on_the_cpu(),
        # DeepSpeed would compile its own collectives; `deepspeed.comm.torch` is torch itself.
        patch.object(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None),
    ):
        yield


def outcomes(folder: str) -> dict[str, Any]:
    with deepspeed_on_the_cpu():
        return outcomes_by_way(folder)
