"""The network of `train_lgt.py`: a U-Net that gives velocities, integrated to the end of time with gradients."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hf_memopt.ranges import COUNT
from hf_memopt.recipes.lgt.options import ModelOptions, Options
from hf_memopt.training.loss_terms import wide

Velocity = Callable[[Tensor, Tensor], Tensor]


def euler(velocity: Velocity, latents: Tensor, time: Tensor, num_steps: int, *, legacy_dt: bool = False) -> Tensor:
    """Return latents at time 1, `(batch, channels, height, width)`, from those at each sample's `time`, `(batch,)`.

    With `legacy_dt` each step takes its share of the time that is then left, as the original does. Starting from 0 it
    ends at 1 - (1 - 1 / num_steps) ** num_steps, about 0.65.
    """
    step = (1 - time) / num_steps
    for _ in range(num_steps):
        if legacy_dt:
            step = (1 - time) / num_steps
        latents = latents + step.view(-1, 1, 1, 1) * velocity(latents, time)
        time = time + step
    return latents


class LatentTransfer(nn.Module):
    """Moves latents to a target style: the U-Net's velocities, integrated.

    `checkpointing` keeps only the latents between steps for backward, and computes each step again. Bitwise the same
    gradients; one more forward pass; memory of one step instead of all.
    """

    def __init__(self, options: ModelOptions, *, legacy_dt: bool = False, average_style: bool = True) -> None:
        super().__init__()
        self.unet = StyleUNet(options, average_style=average_style)
        self.checkpointing = False
        self._legacy_dt = legacy_dt

    def forward(
        self, latents: Tensor, time: Tensor, styles: Tensor, dropped: Tensor, num_steps: int
    ) -> tuple[Tensor, Tensor]:
        """Return latents at time 1, and the mean square of the velocity that each sample started with, `(batch,)`.

        Args:
            latents: at `time`, `(batch, channels, height, width)`.
            time: `(batch,)`, from 0 to 1.
            styles: target style ids, `(batch,)`.
            dropped: samples that get no style, `(batch,)` of bool.
            num_steps: Euler steps.
        """
        first: list[Tensor] = []

        def velocity(latents: Tensor, time: Tensor) -> Tensor:
            found = self._velocity(latents, time, styles, dropped)
            if not first:
                first.append(found)
            return found

        moved = euler(velocity, latents, time, num_steps, legacy_dt=self._legacy_dt)
        return moved, wide(first[0]).square().mean(dim=(1, 2, 3))

    def _velocity(self, *inputs: Tensor) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(self.unet, *inputs, use_reentrant=False)
        return self.unet(*inputs)


class StyleUNet(nn.Module):
    """Velocity of latents at a time, towards a style.

    Three resolutions: full, half and a quarter. The style acts on the way up alone, where it decides the weights of
    depthwise convolutions. About 20 million parameters at the default widths. The last layer and those that make
    weights from styles are zero at first, so that a new network is the identity map.
    """

    def __init__(self, options: ModelOptions, *, average_style: bool = True) -> None:
        super().__init__()
        width, embedding = options.base_channels, options.style_dim
        self.condition = Condition(options, average_style=average_style)
        self.first = nn.Conv2d(options.latent_channels, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Sequential(*(ResBlock(channels) for _ in range(options.num_encoder_blocks)))
            for channels in (width, 2 * width)
        )
        self.shrink = nn.ModuleList(nn.Conv2d(width * n, 2 * width * n, 3, stride=2, padding=1) for n in (1, 2))
        self.middle = nn.Sequential(ResBlock(4 * width), ResBlock(4 * width))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * width * n, width * n, 4, stride=2, padding=1) for n in (2, 1))
        self.up = nn.ModuleList(
            nn.ModuleList(StyleBlock(channels, embedding) for _ in range(options.num_decoder_blocks))
            for channels in (2 * width, width)
        )
        to_velocity = zero_initialised(nn.Conv2d(width, options.latent_channels, 3, padding=1))
        self.last = nn.Sequential(_norm(width), nn.SiLU(), to_velocity)

    def forward(self, latents: Tensor, time: Tensor, styles: Tensor, dropped: Tensor) -> Tensor:
        condition = self.condition(time, styles, dropped)
        x = self.first(latents)
        skipped = []
        for blocks, shrink in zip(self.down, self.shrink, strict=True):
            x = blocks(x)
            skipped.append(x)
            x = shrink(x)
        x = self.middle(x)
        for grow, style_blocks in zip(self.grow, self.up, strict=True):
            x = grow(x) + skipped.pop()
            assert isinstance(style_blocks, nn.ModuleList)
            for block in style_blocks:
                x = block(x, condition)
        return self.last(x)


class Condition(nn.Module):
    """Time and style as one vector per sample, `(batch, style_dim)`."""

    def __init__(self, options: ModelOptions, *, average_style: bool) -> None:
        super().__init__()
        self._num_frequencies = options.time_dim // 2
        self._noise = options.style_noise
        self.time = nn.Sequential(
            nn.Linear(2 * self._num_frequencies, 4 * options.time_dim),
            nn.SiLU(),
            nn.Linear(4 * options.time_dim, options.time_dim),
        )
        self.styles = nn.Embedding(options.num_styles, options.style_dim)
        no_style = torch.zeros(options.style_dim)
        if average_style:
            self.no_style = nn.Parameter(no_style)
        else:
            self.register_buffer("no_style", no_style, persistent=False)
        self.fuse = nn.Sequential(
            nn.Linear(options.time_dim + options.style_dim, 2 * options.style_dim),
            nn.SiLU(),
            nn.Linear(2 * options.style_dim, options.style_dim),
        )

    def forward(self, time: Tensor, styles: Tensor, dropped: Tensor) -> Tensor:
        style = torch.where(dropped[:, None], self.no_style, self.styles(styles))
        if self.training and self._noise:
            style = style + self._noise * torch.randn_like(style)
        return self.fuse(torch.cat([self.time(self._waves(time)), style], dim=1))

    def _waves(self, time: Tensor) -> Tensor:
        """Return cosines and sines of frequencies from 1 down to nearly 1 / 10,000."""
        numbers = torch.arange(self._num_frequencies, device=time.device, dtype=time.dtype)
        angles = time[:, None] * torch.exp(-math.log(10_000) / self._num_frequencies * numbers)
        return torch.cat([angles.cos(), angles.sin()], dim=1)


class ResBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            _norm(channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            _norm(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.layers(x) + x)


class StyleBlock(nn.Module):
    """A depthwise 3 x 3 convolution with weights of each sample's own, made from its condition."""

    def __init__(self, channels: int, style_dim: int) -> None:
        super().__init__()
        self.weights = zero_initialised(nn.Linear(style_dim, 9 * channels))
        self.norm = _norm(channels)
        self.mix = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        weights = self.weights(condition).view(batch * channels, 1, 3, 3)
        # One grouped convolution for the whole batch, a group for each channel of each sample.
        filtered = F.conv2d(x.reshape(1, -1, height, width), weights, padding=1, groups=batch * channels)
        return F.silu(self.mix(F.silu(self.norm(filtered.view_as(x)))) + x)


def zero_initialised[T: (nn.Linear, nn.Conv2d)](layer: T) -> T:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(32, channels), channels)


def compile_module(
    module: nn.Module, *, mode: str = "default", recompile_limit: int = 8, backend: str = "inductor"
) -> None:
    """Compile the calls of `module`, in place: its class, its parameters' names and its state dict stay.

    A part that is called often compiles faster than a loop around it. Compilation takes place in the first call with a
    gradient, its backward in the first backward, and again for other shapes or settings, up to the limit, which is a
    setting of the whole process, `torch._dynamo.config.recompile_limit`. Mode "reduce-overhead" records CUDA graphs,
    which several calls before one backward defeat.
    """
    COUNT.check("recompile_limit", recompile_limit)
    known = ["default", *torch._inductor.list_mode_options()]
    if mode not in known:
        raise ValueError(f"mode={mode!r} is unknown to torch.compile; choose from {', '.join(dict.fromkeys(known))}")
    torch._dynamo.config.recompile_limit = recompile_limit
    # Modes are settings of inductor; other backends take none.
    module.compile(backend=backend, mode=mode if backend == "inductor" else None)


def compile_seconds() -> float:
    return torch._dynamo.utils.calculate_time_spent()["total_wall_time"]


def save_model(model: nn.Module, options: Options, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    (folder / "model.safetensors").write_bytes(save(weights))  # save_file's are for their owner alone to read
    (folder / "config.json").write_text(json.dumps(options.as_dict(), indent=2) + "\n")
