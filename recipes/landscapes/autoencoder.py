"""A small autoencoder of images, trained in about a minute on a CPU."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

FILE = "autoencoder.safetensors"
_NOISE = 0.1  # on latents in training, so that latents which no image has decode to something near
_NUM_BLOCKS = 2
_BATCH_SIZE = 16
_LEARNING_RATE = 2e-3


class Autoencoder(nn.Module):
    """Latents of images whose channels have mean 0 and variance 1 over the training images, and the way back.

    Both halves work at the latents' resolution: the `stride` x `stride` pixels of a latent are channels there.
    """

    def __init__(self, stride: int, channels: int, width: int) -> None:
        super().__init__()
        self.sizes = {"stride": stride, "channels": channels, "width": width}
        pixels = 3 * stride**2
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(stride),
            nn.Conv2d(pixels, width, 1),
            *(_Block(width) for _ in range(_NUM_BLOCKS)),
            nn.SiLU(),
            nn.Conv2d(width, channels, 1),
            nn.BatchNorm2d(channels, affine=False),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            *(_Block(width) for _ in range(_NUM_BLOCKS)),
            nn.SiLU(),
            nn.Conv2d(width, pixels, 1),
            nn.PixelShuffle(stride),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return reconstructions from latents with some noise, `(batch, 3, height, width)` as `images` in [-1, 1]."""
        latents = self.encoder(images)
        reconstructed: Tensor = self.decoder(latents + _NOISE * torch.randn_like(latents))
        return reconstructed

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Return latents, `(batch, channels, height / stride, width / stride)`; in evaluation mode."""
        return torch.cat([self.encoder(part) for part in images.split(32)])

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images, `(batch, 3, height, width)` in [-1, 1]."""
        return torch.cat([self.decoder(part) for part in latents.split(32)]).clamp(-1, 1)

    def save(self, folder: Path) -> None:
        (folder / FILE).write_bytes(save(self.state_dict(), metadata={"sizes": json.dumps(self.sizes)}))

    @classmethod
    def load(cls, folder: Path) -> "Autoencoder":
        with safe_open(folder / FILE, "pt") as file:
            made = cls(**json.loads(file.metadata()["sizes"]))
            made.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return made.eval()


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        last = nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(last.weight)
        self.layers = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.SiLU(), last)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def fit(model: Autoencoder, images: Tensor, num_steps: int) -> Iterator[Tensor]:
    """Train on images, `(num, 3, height, width)` in [-1, 1], by L1 and MSE; yield the loss of each step, `()`."""
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=num_steps)
    model.train()
    for _ in range(num_steps):
        batch = images[torch.randint(len(images), (_BATCH_SIZE,))]
        reconstructed = model(batch)
        loss = F.l1_loss(reconstructed, batch) + F.mse_loss(reconstructed, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.detach()
    model.eval()
