"""The networks of `train_fluxflow.py`: an AutoencoderKL, a patch discriminator and LPIPS."""

import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from hf_memopt.activations import apply_selective_checkpointing
from hf_memopt.recipes.common.flags import explained
from hf_memopt.recipes.fluxflow.options import LeverOptions, LossOptions, ModelOptions

VGG_FILE = "vgg16-397923af.pth"  # as torchvision names it
FIRST_LOG_VARIANCE = -6.0
CHECKPOINTED_BLOCKS = ("DownEncoderBlock2D", "UNetMidBlock2D", "UpDecoderBlock2D")


class Models(NamedTuple):
    vae: Any  # diffusers' AutoencoderKL
    discriminator: nn.Module
    perceptual: "PerceptualLoss | None"


def build_models(model: ModelOptions, losses: LossOptions, levers: LeverOptions, seed: int = 0) -> Models:
    """Return all in training mode, on the CPU. Torch's seed decides the VAE's and the discriminator's weights."""
    vae = make_vae(model).train()
    discriminator = PatchDiscriminator(
        model.discriminator_channels,
        model.discriminator_layers,
        normalised=model.spectral_norm,
        image_channels=vae.config.in_channels,
    )
    if levers.checkpoint_vae:
        apply_selective_checkpointing(vae, "all", modules=CHECKPOINTED_BLOCKS)
    if levers.checkpoint_discriminator:
        apply_selective_checkpointing(discriminator, "all", modules=["layers"])
    return Models(vae, discriminator, make_perceptual(losses, seed) if losses.lpips_weight else None)


def make_vae(options: ModelOptions) -> Any:
    if options.vae is None:
        return _new_vae(options)
    with explained(f"vae={options.vae!r} cannot be loaded; pass a hub id or folder of a diffusers AutoencoderKL"):
        loaded = _read_vae(options.vae)
    channels = loaded.config.in_channels
    if channels not in (1, 3) or loaded.config.out_channels != channels:
        raise ValueError(
            f"vae={options.vae!r} goes from {channels} to {loaded.config.out_channels} channels; images have 3, or 1 "
            "if they are gray"
        )
    return loaded


def _read_vae(name: str) -> Any:
    """Read a VAE, or that of a whole pipeline, which has it in a folder of its own."""
    try:
        return AutoencoderKL.from_pretrained(name)
    except OSError:
        if Path(name).is_dir() and not (Path(name) / "vae").is_dir():
            raise
        return AutoencoderKL.from_pretrained(name, subfolder="vae")


def _new_vae(options: ModelOptions) -> Any:
    depth = len(options.channels)
    made = AutoencoderKL(
        block_out_channels=tuple(options.channels),
        down_block_types=("DownEncoderBlock2D",) * depth,
        up_block_types=("UpDecoderBlock2D",) * depth,
        layers_per_block=options.layers_per_block,
        latent_channels=options.latent_channels,
        # As many channels in each group as Stable Diffusion's has. With one it could not tell how bright an image is.
        norm_num_groups=max(1, math.gcd(128, *options.channels) // 4),
    )
    # Latents begin with little noise. At diffusers' variance of 1 it drowns them for the first thousand steps.
    with torch.no_grad():
        made.quant_conv.bias[options.latent_channels :] = FIRST_LOG_VARIANCE
    return made


def stride(vae: Any) -> int:
    """Return the pixels per latent along a side; images are multiples of it."""
    return int(2 ** (len(vae.config.block_out_channels) - 1))


class PatchDiscriminator(nn.Module):
    """Convolutions from an image to a logit per patch: `(batch, image_channels, height, width)` to `(batch, 1, h, w)`.

    With spectral normalisation, a forward pass in training mode moves a power iteration on, which is kept in buffers.
    """

    def __init__(self, channels: int, num_halvings: int, *, normalised: bool, image_channels: int = 3) -> None:
        super().__init__()
        widths = [image_channels, *(channels * 2**level for level in range(num_halvings + 1))]
        strides = [1, *[2] * num_halvings]
        layers: list[nn.Module] = []
        for i, o, step in zip(widths, widths[1:], strides, strict=False):
            layers += [nn.Conv2d(i, o, 3 if step == 1 else 4, step, 1), nn.LeakyReLU(0.2, inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 3, 1, 1))
        for layer in self.layers if normalised else ():
            if isinstance(layer, nn.Conv2d):
                spectral_norm(layer)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class PerceptualLoss(nn.Module):
    """LPIPS on VGG16, frozen: two batches `(batch, 3 or 1, height, width)` in [-1, 1] to `(batch, 1, 1, 1)`.

    `weights` is "imagenet", from torch hub's cache, or "random": the same computation and memory, and no perception.
    The seed of random weights leaves torch's own random numbers alone.
    """

    def __init__(self, weights: str, seed: int = 0) -> None:
        import lpips  # with torchvision it takes seconds

        super().__init__()
        random = weights == "random"
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore", UserWarning)  # of torchvision, about the arguments that lpips passes
            torch.manual_seed(seed)
            self.lpips = lpips.LPIPS(net="vgg", pnet_rand=random, verbose=False).eval().requires_grad_(False)
        self.name = "lpips_load_only" if random else "lpips"
        self.description = (
            f"LOAD ONLY: VGG16 with random weights, seed {seed}. It costs as much as LPIPS, but measures no perception"
            if random
            else "LPIPS on VGG16 with ImageNet weights"
        )

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.lpips(output, target)


def make_perceptual(losses: LossOptions, seed: int = 0) -> PerceptualLoss:
    """Return LPIPS with the weights that `lpips_weights` names. Nothing is downloaded."""
    file = Path(torch.hub.get_dir()) / "checkpoints" / VGG_FILE
    wanted = losses.lpips_weights
    if wanted == "auto":
        wanted = "imagenet" if file.is_file() else "random"
    if wanted == "imagenet" and not file.is_file():
        raise ValueError(
            f"lpips_weights='imagenet': there is no {file}; torchvision.models.vgg16(weights='IMAGENET1K_V1') gets it "
            "where there is a network, and --lpips_weights random does without, to measure load only"
        )
    return PerceptualLoss(wanted, seed)
