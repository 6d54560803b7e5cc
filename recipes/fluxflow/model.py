"""The networks of `train_fluxflow.py`, the average of the VAE's weights, and several processes' gradients."""

import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from hf_memopt.activations import apply_selective_checkpointing
from hf_memopt.recipes.common.flags import explained
from hf_memopt.recipes.fluxflow.options import LeverOptions, LossOptions, ModelOptions, Options

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


ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the new name and the old one
EXPANDABLE = "expandable_segments:True"


def use_expandable_segments() -> None:
    """Ask CUDA's allocator for segments that grow, through the environment, which it reads when CUDA starts."""
    given = {name: os.environ[name] for name in ALLOCATOR_SETTINGS if name in os.environ}
    if any(EXPANDABLE in value for value in given.values()):
        return
    if given:
        name, value = next(iter(given.items()))
        raise ValueError(f"expandable_segments=True: {name}={value!r} is set already; add {EXPANDABLE!r}, or unset it")
    if torch.cuda.is_initialized():
        raise ValueError(
            "expandable_segments=True: CUDA has started already, and its allocator has read its settings; set "
            f"{ALLOCATOR_SETTINGS[0]}={EXPANDABLE} in the environment before the start"
        )
    os.environ[ALLOCATOR_SETTINGS[0]] = EXPANDABLE


class WeightAverage:
    """Exponential moving average of a model's weights: diffusers' `EMAModel`, on the device or in host memory.

    The n-th update keeps a share of (1 + n) / (10 + n) of it, `decay` at most. On another device than the model's, an
    update copies all weights there and waits.
    """

    def __init__(self, model: nn.Module, decay: float, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._ema = EMAModel(model.parameters(), decay=decay, foreach=True)
        self._ema.to(device)

    def step(self) -> None:
        # A copy requires no gradient, and EMAModel averages only weights that do.
        self._ema.step([p.detach().to(self._device).requires_grad_(p.requires_grad) for p in self._model.parameters()])

    @contextmanager
    def applied(self) -> Iterator[None]:
        self._ema.store(self._model.parameters())
        self._ema.copy_to(self._model.parameters())
        try:
            yield
        finally:
            self._ema.restore(self._model.parameters())

    def state_dict(self) -> dict[str, Any]:
        return self._ema.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ema.load_state_dict(state)
        self._ema.to(self._device)


def make_average(model: nn.Module, options: Options, device: torch.device) -> WeightAverage | None:
    home = torch.device("cpu") if options.levers.ema_on_cpu else device
    return WeightAverage(model, options.training.ema_decay, home) if options.training.ema_decay else None


def average_gradients(accelerator: Accelerator, parameters: list[nn.Parameter]) -> None:
    """Average gradients over processes, all in one exchange, which takes a copy of them."""
    if accelerator.num_processes == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    everything = accelerator.reduce(torch.cat([gradient.flatten() for gradient in gradients]), "mean")
    for gradient, mean in zip(gradients, everything.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def save_vae(vae: Any, average: WeightAverage | None, folder: Path) -> None:
    """Write folders for `AutoencoderKL.from_pretrained`: `vae`, as trained, and `vae_ema`, the average of weights."""
    vae.save_pretrained(folder / "vae")
    if average is not None:
        with average.applied():
            vae.save_pretrained(folder / "vae_ema")
