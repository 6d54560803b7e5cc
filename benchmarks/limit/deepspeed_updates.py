"""Full fine-tuning by DeepSpeed's ZeRO-3 on the CPU, with weights and optimizer in files.

The settings are those of https://www.deepspeed.ai/docs/config-json/ for NVMe. Buffers have room for the largest weight,
no weight is gathered long before its use, and none is kept in memory after it, where up to 1e9 elements are by default.
"""

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from benchmarks.limit.full_training import MAX_NORM, MICRO_BATCHES, Updates

LARGEST_SMALL = 4096  # elements of a weight that stays in memory


class DeepSpeedUpdates(Updates):
    """Updates by an engine of DeepSpeed, in one process on the CPU."""

    def __init__(self, base: Path, folder: Path, num_tokens: int, num_steps: int) -> None:
        with torch.device("meta"):
            largest = max(each.numel() for each in LlamaForCausalLM(LlamaConfig.from_pretrained(base)).parameters())
        config = settings(folder, largest)
        in_effect = HfDeepSpeedConfig(config)  # transformers loads partitioned weights while this object lives
        model = LlamaForCausalLM.from_pretrained(base).train()
        engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
        del in_effect
        super().__init__(model, optimizer.optimizer, num_tokens, num_steps, visit=_gathered)
        self._forward = engine

    def _backward(self, loss: Tensor) -> None:
        self._forward.backward(loss)
        self._forward.step()  # updates the weights after the last micro-batch

    def _update(self) -> None:
        self._schedule.step()

    def _state_digest(self) -> None:
        return None


def start() -> None:
    """Make this process the only one of its group."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo")


def settings(folder: Path, largest: int) -> dict[str, Any]:
    on_disk = {"device": "nvme", "nvme_path": str(folder), "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**on_disk, "buffer_count": 4, "buffer_size": largest, "max_in_cpu": 0},
            "offload_optimizer": {**on_disk, "buffer_count": 4},
            "stage3_max_live_parameters": largest,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": largest,
            "stage3_param_persistence_threshold": LARGEST_SMALL,
            "reduce_bucket_size": largest,
            "sub_group_size": largest,
        },
        "aio": {
            "block_size": 2**20,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def _gathered(module: nn.Module) -> Any:
    return deepspeed.zero.GatheredParameters(list(module.parameters()))
