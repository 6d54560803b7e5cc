"""A small LightningModule with all parts of a training step, and a trainer that writes nothing."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_memopt import ActivationOffloader, SyncCopier


class Regression(LightningModule):
    """A loss outside of forward; `manual` updates in the step itself, and step `fail_at` (from 0) fails in a layer."""

    def __init__(self, *, manual: bool = False, fail_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.GELU()) for _ in range(3)))
        self.automatic_optimization = not manual
        self.fail_at = fail_at
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.fail_at == batch_idx:
            self.layers[1].register_forward_pre_hook(fail)
        loss = (self.layers(batch) - batch.sin()).square().mean()
        self.losses.append(loss.detach())
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():  # as physics-informed models do
            (self.layers(batch).sum() * self.layers[0][0].weight.sum()).backward()
        self.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fail(*args: Any) -> None:
    raise RuntimeError("injected")


def loader(num_batches: int = 6) -> DataLoader[Tensor]:
    return DataLoader(torch.randn(num_batches * 8, 16, generator=torch.Generator().manual_seed(1)), batch_size=8)


def trainer(folder: Path, *callbacks: Any, **settings: Any) -> Trainer:
    options = {"max_epochs": 2, "log_every_n_steps": 1, "accelerator": "cpu", "devices": 1, "logger": False}
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return Trainer(default_root_dir=folder, callbacks=list(callbacks), **(options | quiet | settings))


def offloader(mode: str = "all") -> ActivationOffloader:
    """Return an offloader that moves every saved tensor, on a CPU too."""
    return ActivationOffloader(mode=mode, offload_threshold_mb=0, copier=SyncCopier())
