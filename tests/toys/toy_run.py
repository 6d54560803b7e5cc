"""A training run of milliseconds that has everything a checkpoint must hold."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    set_seed,
)
from accelerators import sharding_on_the_cpu
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from hf_memopt.checkpoint import Checkpoints, endless_batches

NUM_STEPS = 6
BATCHES_PER_STEP = 2  # of 7 in an epoch, so that a window crosses its end


class Average:
    """A moving average, which accelerate saves because it is registered."""

    def __init__(self) -> None:
        self.value = torch.zeros(())

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value = state["value"]


class ToyRun:
    """Accumulation, dropout, AdamW, a schedule, a loss scaler and a shuffled loader, from a seed of its own."""

    def __init__(
        self,
        folder: Path,
        keep_last: int = 2,
        seed: int = 0,
        cpu: bool = True,
        mixed_precision: str = "no",
        sharded: bool = False,
    ) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        settings: dict[str, Any] = {
            "mixed_precision": mixed_precision,
            "gradient_accumulation_plugin": GradientAccumulationPlugin(BATCHES_PER_STEP, sync_with_dataloader=False),
            "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
        }
        if sharded:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
            self.accelerator = sharding_on_the_cpu(fsdp_plugin=plugin, **settings)
        else:
            self.accelerator = Accelerator(cpu=cpu, **settings)
        if cpu:  # where accelerate makes none
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        set_seed(seed, device_specific=True)
        samples = torch.randn(14, 4, generator=torch.Generator().manual_seed(5))
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        loader = DataLoader(samples, 2, shuffle=True, generator=torch.Generator(), drop_last=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        self.average = Average()
        self.accelerator.register_for_checkpointing(self.average)
        self.checkpoints = Checkpoints(self.accelerator, folder, keep_last)
        set_seed(seed, device_specific=True)  # again: imports of the first DDP of a process draw
        self.num_steps = 0
        self.losses: list[float] = []

    def resume(self, name: str | Path = "latest") -> None:
        position = self.checkpoints.resume(name)
        self.num_steps, self.losses = position["step"], position["losses"]

    def save(self) -> Path:
        return self.checkpoints.save(self.num_steps, {"step": self.num_steps, "losses": self.losses})

    def train(self, num_steps: int = NUM_STEPS, save: bool = False) -> None:
        batches = endless_batches(self.accelerator, self.loader, BATCHES_PER_STEP * self.num_steps)
        while self.num_steps < num_steps:
            self._update(batches)
            self.num_steps += 1
            if save:
                self.save()

    def state(self) -> dict[str, Any]:
        """Return all states that decide how the run goes on, flat, and the losses so far."""
        found: dict[str, Any] = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": value for name, value in values.items()}
        found["average"] = self.average.value
        found["torch"] = torch.get_rng_state()
        found["random"], found["numpy"] = random.getstate(), repr(np.random.get_state())
        found["schedule"] = self.schedule.state_dict()
        found["scaler"] = self.accelerator.scaler.state_dict() if self.accelerator.scaler else None
        if self.accelerator.device.type != "cpu":
            found["device"] = torch.cuda.get_rng_state()
        found["losses"] = self.losses
        found = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
        return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in found.items()}

    def _update(self, batches: Any) -> None:
        for _ in range(BATCHES_PER_STEP):
            batch = next(batches) + random.random() + np.random.rand()
            with self.accelerator.accumulate(self.model):
                loss = self.model(batch).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        self.average.value = 0.9 * self.average.value + 0.1 * loss.detach()
        self.losses.append(loss.item())
