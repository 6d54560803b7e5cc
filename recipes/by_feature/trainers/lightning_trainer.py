"""Lightning's Trainer: activations in host memory, by one callback.

python recipes/by_feature/trainers/lightning_trainer.py    # needs the extra lightning
"""

import tempfile
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_memopt import ActivationOffloader, SyncCopier  # hf_memopt
from hf_memopt.integrations.lightning import ActivationOffloading  # hf_memopt

on_cpu = not torch.accelerator.is_available()


class Denoiser(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
        self.layers = nn.Sequential(*blocks, nn.Linear(128, 128))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.layers(batch + 0.1 * torch.randn_like(batch)) - batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(folder: str, callbacks: list[object]) -> Denoiser:
    seed_everything(0)
    trainer = Trainer(
        max_steps=20,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        precision="32-true" if on_cpu else "bf16-mixed",
        accelerator="cpu" if on_cpu else "auto",
        devices=1,
        log_every_n_steps=5,
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Denoiser()
    samples: Any = torch.randn(640, 128)  # a tensor serves as a dataset of its rows
    trainer.fit(model, DataLoader(samples, batch_size=16))
    return model


with tempfile.TemporaryDirectory() as folder:
    plain = train(folder, [])
    # A GPU needs no more than ActivationOffloading(). A CPU moves nothing by itself; this shows the copies.
    offloader = ActivationOffloader(
        offload_threshold_mb=0.0, mode="all" if on_cpu else "auto", copier=SyncCopier() if on_cpu else None
    )
    offloaded = train(folder, [ActivationOffloading(offloader)])  # hf_memopt
print(f"{offloader.stats.bytes_moved / 2**20:.1f} MiB went to host memory and came back")
equal = all(map(torch.equal, plain.parameters(), offloaded.parameters()))
print(f"Weights equal to those without offloading: {equal}")
