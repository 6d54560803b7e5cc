"""Updates on the host, by the engine that a file for `accelerate launch` chooses, for test_host_optimizers.py."""

import os
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from accelerators import engines_on_the_cpu
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64
NUM_UPDATES, NUM_MICRO_BATCHES = 3, 2
# An epsilon that no rounding of a gradient near zero can be seen beside.
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}


def sizes(width: int) -> dict[str, int]:
    of_layers = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
    return of_layers | {"vocab_size": VOCABULARY, "num_attention_heads": 4, "max_position_embeddings": 32}


def llama(width: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes(width)))


def tokens(update: int, micro_batch: int, rank: int) -> Tensor:
    seed = (update * NUM_MICRO_BATCHES + micro_batch) * 2 + rank
    return torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(seed))


def sharded(max_grad_norm: float | None, width: int) -> dict[str, Any]:
    """Train as a script that was launched with the file."""
    windows = GradientAccumulationPlugin(NUM_MICRO_BATCHES, sync_with_dataloader=False, sync_each_batch=True)
    accelerator = Accelerator(gradient_accumulation_plugin=windows)
    if (zero := accelerator.state.deepspeed_plugin) is not None:
        zero.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
    model: Any = llama(width)
    optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=False, **SETTINGS)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for update in range(NUM_UPDATES):
        for micro_batch in range(NUM_MICRO_BATCHES):
            with accelerator.accumulate(model):
                batch = tokens(update, micro_batch, accelerator.process_index)
                loss = model(input_ids=batch, labels=batch).loss
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients and max_grad_norm is not None:
                    accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
    return {
        "engine": str(accelerator.distributed_type),
        "keeper": _keeper(accelerator, model, optimizer),
        "losses": losses,
        "weights": _whole(accelerator, model),
    }


def _keeper(accelerator: Accelerator, model: Any, optimizer: Any) -> str:
    """Return the name of the class that keeps the optimizer's state on the host."""
    if not accelerator.is_fsdp2:
        return type(optimizer.optimizer.optimizer).__name__
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
    (kind,) = {type(group.offload_policy).__name__ for group in groups}
    return kind


def _whole(accelerator: Accelerator, model: Any) -> list[Tensor]:
    if accelerator.is_fsdp2:
        return [parameter.detach().full_tensor() for parameter in model.parameters()]
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [parameter.detach().float().clone() for parameter in model.parameters()]


def plain(num_ranks: int, max_grad_norm: float | None, width: int) -> tuple[list[list[float]], list[Tensor]]:
    """Return each rank's losses and the weights of plain updates, with gradients averaged in the order of engines."""
    model = llama(width)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **SETTINGS)
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    for update in range(NUM_UPDATES):
        for micro_batch in range(NUM_MICRO_BATCHES):
            averaged = [torch.zeros_like(parameter) for parameter in model.parameters()]
            for rank in range(num_ranks):
                batch = tokens(update, micro_batch, rank)
                loss = model(input_ids=batch, labels=batch).loss
                losses[rank].append(loss.item())
                gradients = torch.autograd.grad(loss / NUM_MICRO_BATCHES, list(model.parameters()))
                torch._foreach_add_(averaged, gradients, alpha=1 / num_ranks)
            for parameter, gradient in zip(model.parameters(), averaged, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [parameter.detach() for parameter in model.parameters()]


def outcomes(max_grad_norm: float | None, width: int) -> dict[str, Any]:
    with ExitStack() as stack:
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            from deepspeed.accelerator import get_accelerator
            from zero_rank import deepspeed_on_the_cpu

            stack.enter_context(deepspeed_on_the_cpu())
            # Without float16 DeepSpeed would keep float32 weights in bfloat16 on a disk; all GPUs have it.
            stack.enter_context(patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True))
        else:
            stack.enter_context(engines_on_the_cpu())
        # Memory is pinned for a device, of which there is none.
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda tensor, *device: tensor))
        stack.enter_context(patch.object(Tensor, "is_pinned", lambda tensor, *device: True))
        found = sharded(max_grad_norm, width)
        num_ranks = torch.distributed.get_world_size()
    losses, weights = plain(num_ranks, max_grad_norm, width)
    rank = int(os.environ["RANK"])
    pairs = zip(found.pop("weights"), weights, strict=True)
    differences = [(ours - theirs).abs().max().item() for ours, theirs in pairs]
    return found | {"difference": max(differences), "plain losses": losses[rank]}
