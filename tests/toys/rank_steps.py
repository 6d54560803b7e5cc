"""Training steps that several ranks run together, real or simulated, and the bytes that they hold."""

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_memopt.planning.simulation.ranks.first_rank import BACKEND

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 250, "num_hidden_layers": 3, "vocab_size": 515}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


class Way(NamedTuple):
    """How a model is trained: `reshard` is FSDP2's `reshard_after_forward`, and `zero` are options of DeepSpeed's
    `zero_optimization`. Without both it is DDP, with these options. `offload` is FSDP2's `CPUOffloadPolicy`.
    """

    reshard: bool | None = None
    offload: bool = False
    zero: tuple[tuple[str, Any], ...] = ()
    ddp: tuple[tuple[str, Any], ...] = ()
    precision: str = "no"
    num_micro_batches: int = 1
    checkpointing: bool = False


WAYS = {
    "ddp": Way(),
    "ddp, small buckets that gradients are views of": Way(
        ddp=(("bucket_cap_mb", 1), ("gradient_as_bucket_view", True))
    ),
    "ddp, accumulating": Way(ddp=(("bucket_cap_mb", 1),), num_micro_batches=2),
    "fsdp2": Way(reshard=True),
    "fsdp2, not resharded": Way(reshard=False),
    "fsdp2 in bfloat16, accumulating, checkpointed": Way(
        reshard=True, precision="bf16", num_micro_batches=2, checkpointing=True
    ),
}
OFFLOADING_WAYS = {
    "fsdp2, offloading": Way(reshard=True, offload=True),
    "fsdp2, offloading in bfloat16, accumulating": Way(
        reshard=True, offload=True, precision="bf16", num_micro_batches=2
    ),
}
_TWO = (("stage", 2), ("reduce_bucket_size", 60_000))
_THREE = (("stage", 3), ("reduce_bucket_size", 100_000), ("stage3_param_persistence_threshold", 200))
_LITTLE_AHEAD = (("stage3_prefetch_bucket_size", 50_000), ("stage3_max_live_parameters", 200_000))
ZERO_WAYS = {
    "zero2 in bfloat16, accumulating": Way(zero=_TWO, precision="bf16", num_micro_batches=2),
    "zero3 in bfloat16, accumulating, checkpointed": Way(
        zero=(*_THREE, *_LITTLE_AHEAD), precision="bf16", num_micro_batches=2, checkpointing=True
    ),
}
MORE_ZERO_WAYS = {
    "zero2": Way(zero=_TWO),
    "zero2 in float16, overlapping": Way(zero=(*_TWO, ("overlap_comm", True)), precision="fp16"),
    "zero3": Way(zero=_THREE),
    "zero3 in float16, with DeepSpeed's sizes": Way(zero=(("stage", 3),), precision="fp16"),
}


_ON_HOST = ("offload_optimizer", {"device": "cpu"})
OFFLOADING_ZERO_WAYS = {
    "zero2, optimizer on the host": Way(zero=(*_TWO, _ON_HOST)),
    "zero3 in bfloat16, optimizer on the host": Way(zero=(*_THREE, _ON_HOST), precision="bf16", num_micro_batches=2),
    "zero3, weights on the host": Way(zero=(*_THREE, _ON_HOST, ("offload_param", {"device": "cpu"})), precision="bf16"),
}


class State(NamedTuple):
    accelerator: Accelerator
    model: Any
    optimizer: Any
    batch: Tensor
    num_micro_batches: int
    write_held: Callable[[dict[str, int]], Any]


def setup(way: Way, device: torch.device, backend: str, write_held: Callable[[dict[str, int]], Any]) -> State:
    """Prepare as on a GPU: Accelerate ignores FSDP2 on CPUs. `write_held` gets the held bytes after each update."""
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = zero = None
    if way.reshard is not None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=way.reshard,
            auto_wrap_policy="transformer_based_wrap",
            cpu_offload=CPUOffloadPolicy(pin_memory=False) if way.offload else None,  # nothing is pinned for a CPU
        )
    if way.zero:
        config = {"zero_optimization": dict(way.zero), "gradient_accumulation_steps": way.num_micro_batches}
        config |= {"gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 2}
        # The default scale would have the first updates left out.
        config["fp16"] = {"enabled": way.precision == "fp16", "initial_scale_power": 4}
        zero = DeepSpeedPlugin(hf_ds_config=config)
    places = {"ACCELERATE_TORCH_DEVICE": str(device), "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
    if way.zero:
        places["ACCELERATE_USE_CPU"] = "false"  # Accelerate would ignore DeepSpeed
    with (
        patch.dict(os.environ, places),
        nullcontext()
        if backend == BACKEND
        else patch.object(PartialState, "_prepare_backend", lambda *options: (backend, DistributedType.MULTI_GPU)),
    ):
        accelerator = Accelerator(
            mixed_precision=way.precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                way.num_micro_batches, sync_with_dataloader=False, sync_each_batch=way.offload
            ),
            fsdp_plugin=plugin,
            deepspeed_plugin=zero,
            kwargs_handlers=[DistributedDataParallelKwargs(**dict(way.ddp))],
        )
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
        if way.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model, optimizer = accelerator.prepare(model, optimizer)
    batch = torch.zeros(2, 16, dtype=torch.long, device=device)
    return State(accelerator, model, optimizer, batch, way.num_micro_batches, write_held)


def step(state: State) -> None:
    for _ in range(state.num_micro_batches):
        with state.accelerator.accumulate(state.model):
            state.accelerator.backward(state.model(input_ids=state.batch, labels=state.batch).loss)
            if state.accelerator.sync_gradients:
                state.accelerator.clip_grad_norm_(state.model.parameters(), 1.0)
            state.optimizer.step()
    state.write_held(_held_bytes(state))
    if state.accelerator.distributed_type != DistributedType.DEEPSPEED:  # which has cleared them
        state.optimizer.optimizer.zero_grad()


def _held_bytes(state: State) -> dict[str, int]:
    """Return a rank's bytes of storages, found without the log that the estimate is made from."""
    parameters = list(state.model.parameters())
    shares = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    return {
        "parameters": _bytes_of(parameters + shares),
        "gradients": _bytes_of(parameter.grad for parameter in parameters),
        "optimizer state": _bytes_of(value for each in state.optimizer.state.values() for value in each.values()),
    }


def _bytes_of(tensors: Iterable[Any]) -> int:
    local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors if isinstance(each, Tensor)]
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in local}.values())
