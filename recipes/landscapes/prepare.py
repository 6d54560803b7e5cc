"""Write latents of landscapes in two styles, painted and drawn, and the autoencoder that they are from.

    python -m hf_memopt.recipes.landscapes.prepare --output_dir outputs/landscapes
    accelerate launch -m hf_memopt.recipes.train_lgt --data.data_root outputs/landscapes \\
        --data.style_subdirs painted drawn --inference.vae_path outputs/landscapes

The autoencoder is trained on landscapes of its own, so that it has seen none of those that are encoded. It takes about
a minute on a CPU, and nothing is downloaded.
"""

import logging
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from accelerate.utils import tqdm
from safetensors.torch import save
from torch import Tensor

from hf_memopt.command_line import check_output_folder, one_line_errors, script_imports
from hf_memopt.recipes.common.flags import Count, Seed, TwoOrMore, flag, read_options
from hf_memopt.recipes.common.results import psnr

with script_imports("prepare", __name__):
    from PIL import Image

    from hf_memopt.recipes.landscapes.autoencoder import Autoencoder, fit
    from hf_memopt.recipes.landscapes.draw import STRIDE, in_ink, landscape, painted

STYLES: dict[str, Callable[[Image.Image, random.Random], Image.Image]] = {
    "painted": painted,
    "drawn": lambda scene, numbers: in_ink(scene),
}
logger = logging.getLogger("hf_memopt.recipes.landscapes")


@dataclass
class SceneOptions:
    output_dir: str = flag("outputs/landscapes", "folder for the autoencoder and a folder of latents for each style")
    num_images: TwoOrMore = flag(256, "of each style that are encoded; as many others train the autoencoder")
    latent_size: Count = flag(16, f"side of the latents; images have {STRIDE} times as many pixels")
    latent_channels: Count = flag(4, "of the latents")
    width: Count = flag(64, "channels within the autoencoder")
    num_steps: TwoOrMore = flag(600, "updates of the autoencoder, of 16 images each")
    seed: Seed = flag(0, "of images and weights")


class Options(NamedTuple):
    scenes: SceneOptions


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    options = read_options(Options, __doc__, arguments).scenes
    output = Path(options.output_dir)
    check_output_folder("output_dir", output)
    if options.latent_size % 4:
        raise ValueError(f"latent_size={options.latent_size} must be a multiple of 4: train_lgt halves it twice")
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    torch.manual_seed(options.seed)
    model = Autoencoder(STRIDE, options.latent_channels, options.width)
    num, size = options.num_images, STRIDE * options.latent_size
    seen = torch.cat([images_of(style, num, size, 2 * options.seed + 1) for style in STYLES])
    for _ in tqdm(fit(model, seen, num_steps=options.num_steps), total=options.num_steps, desc="Autoencoder"):
        pass
    found = {}
    for style in STYLES:
        images = images_of(style, num, size, 2 * options.seed)
        latents = model.encode(images)
        found[style] = psnr(model.decode(latents), images)
        (output / style).mkdir(parents=True, exist_ok=True)
        (output / style / "latents.safetensors").write_bytes(save({"latents": latents}))
        logger.info(f"{style}: {len(latents)} latents of {tuple(latents.shape[1:])}, decoded at {found[style]:.1f} dB")
    model.save(output)
    return found


def images_of(style: str, num: int, size: int, seed: int) -> Tensor:
    """Return landscapes in one of `STYLES`, `(num, 3, size, size)` in [-1, 1]; styles share no landscape."""
    numbers = random.Random(f"{style} {seed}")
    images = [np.asarray(STYLES[style](landscape((size, size), numbers), numbers)) for _ in range(num)]
    return torch.from_numpy(np.stack(images)).movedim(-1, 1).contiguous().float().div_(127.5).sub_(1)


if __name__ == "__main__":
    sys.exit(one_line_errors("prepare", main))
