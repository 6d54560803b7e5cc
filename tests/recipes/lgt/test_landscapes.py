import random
from pathlib import Path

import numpy as np
import pytest
import torch
from lgt_toys import tiny
from PIL import Image
from safetensors.torch import load_file

from hf_memopt.recipes.landscapes.autoencoder import Autoencoder
from hf_memopt.recipes.landscapes.draw import STRIDE, in_ink, landscape, painted
from hf_memopt.recipes.landscapes.prepare import images_of, main, psnr
from hf_memopt.recipes.lgt import data as lgt_data


def saturation(image: Image.Image) -> float:
    return float(np.asarray(image.convert("HSV"))[..., 1].mean())


def test_the_styles_can_be_told_apart_and_show_the_same_scene() -> None:
    scene = landscape((64, 48), random.Random(0))
    colours, ink = painted(scene, random.Random(1)), in_ink(scene)
    assert colours.size == ink.size == (64, 48)
    assert len(ink.getcolors() or ()) == 2
    assert saturation(colours) > 2 * saturation(ink)
    # Lines of ink lie on the edges of the colours.
    materials = np.asarray(scene)[2::4, 2::4]
    edges = materials[:, 1:] != materials[:, :-1]
    assert (np.asarray(ink)[:, 1:][edges] == (30, 30, 45)).all()


def test_the_seed_decides_images_and_styles_share_none() -> None:
    first, again, other = (images_of("painted", 3, 32, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not (first[:, None] == other[None]).all(dim=(2, 3, 4)).any()
    assert first.shape == (3, 3, 32, 32)
    assert -1 <= first.min() < first.max() <= 1
    scenes = [landscape((32, 32), random.Random(f"{style} 0")) for style in ("painted", "drawn")]
    assert scenes[0].tobytes() != scenes[1].tobytes()


def test_prepared_latents_are_what_training_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num_images=16", "--latent_size=8", "--width=8", "--num_steps=30", f"--output_dir={tmp_path}")
    found = main(flags)
    model = Autoencoder.load(tmp_path)
    for style in ("painted", "drawn"):
        latents = load_file(tmp_path / style / "latents.safetensors")["latents"]
        images = images_of(style, 16, 8 * STRIDE, 0)
        assert torch.equal(latents, model.encode(images))
        assert psnr(model.decode(latents), images) == found[style]
    config = tiny(data__data_root=str(tmp_path), data__style_subdirs=["painted", "drawn"])
    train_data, held_out = lgt_data.load(config)
    assert train_data.latents.shape == (28, 4, 8, 8)
    assert held_out.styles.tolist() == [0, 0, 1, 1]
    assert main(flags) == found  # the same again, over the existing files


@pytest.mark.slow
def test_the_autoencoder_learns(tmp_path: Path) -> None:
    base = ("--num_images=32", "--latent_size=8", "--width=16", f"--output_dir={tmp_path}")
    little, more = (main([*base, f"--num_steps={num}"]) for num in (2, 120))
    assert all(more[style] > little[style] + 3 for style in more)


def test_sizes_that_training_cannot_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="latent_size=10 must be a multiple of 4"):
        main([f"--output_dir={tmp_path / 'x'}", "--latent_size=10"])
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"output_dir=.* is a file"):
        main([f"--output_dir={tmp_path / 'file'}"])
    assert not (tmp_path / "x").exists()
