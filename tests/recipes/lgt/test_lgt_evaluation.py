from pathlib import Path

import pytest
import torch
from lgt_toys import tiny
from PIL import Image
from torch import Tensor

from hf_memopt.recipes.landscapes.autoencoder import Autoencoder
from hf_memopt.recipes.lgt import data as lgt_data
from hf_memopt.recipes.lgt import report as lgt_evaluation
from hf_memopt.recipes.lgt.step import build_model


def test_panels_are_decoded_by_the_users_own_vae(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def decode(latents: Tensor, folder: str) -> Tensor:
        seen[folder] = latents.shape
        return torch.zeros(len(latents), 8, 8, 3)

    config = tiny(inference__vae_path="vae", inference__num_panels=3)
    train_data, held_out = lgt_data.load(config)
    bank = lgt_data.LatentBank(train_data, config, torch.device("cpu"))
    columns = lgt_evaluation.panels(build_model(config), bank, held_out, config)
    assert list(columns) == ["content", "translated", "reference"]
    contents = columns["content"]
    assert all(any(torch.equal(each, latent) for latent in held_out.latents) for each in contents)
    monkeypatch.setattr(lgt_evaluation, "decode", decode)
    decoded = lgt_evaluation.images_of(columns, config)
    assert seen == {"vae": (3, 4, 8, 8)}
    assert decoded["content"].shape == (3, 8, 8, 3)


def test_references_have_the_style_that_the_content_has_not() -> None:
    """Check among latents whose values are all s for style s."""
    styles = torch.arange(2).repeat(8)
    latents = lgt_data.Latents(styles.view(-1, 1, 1, 1).float().expand(-1, 4, 8, 8), styles)
    config = tiny(inference__num_panels=4)
    bank = lgt_data.LatentBank(latents, config, torch.device("cpu"))
    columns = lgt_evaluation.panels(build_model(config), bank, latents, config)
    assert columns["content"][:, 0, 0, 0].tolist() == [0, 1, 0, 1]
    assert columns["reference"][:, 0, 0, 0].tolist() == [1, 0, 1, 0]


def test_panels_are_drawn_with_the_names_of_the_styles(tmp_path: Path) -> None:
    config = tiny(inference__num_panels=3, data__style_subdirs=["monet", "photo"])
    train_data, held_out = lgt_data.load(config)
    bank = lgt_data.LatentBank(train_data, config, torch.device("cpu"))
    lgt_evaluation.draw_panels(build_model(config), bank, held_out, config, tmp_path / "panels.png")
    with Image.open(tmp_path / "panels.png") as image:
        assert image.size == (510, 555)  # three columns and three rows, in pixels


def test_the_small_autoencoder_decodes_latents(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Autoencoder(stride=2, channels=4, width=8).eval()
    model.save(tmp_path)
    latents = torch.randn(3, 4, 8, 8)
    images = lgt_evaluation.decode(latents, str(tmp_path))
    assert images.shape == (3, 16, 16, 3)
    assert torch.equal(images, (model.decode(latents) / 2 + 0.5).clamp(0, 1).movedim(1, -1))


@pytest.mark.slow
def test_a_vae_decodes_latents(tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    AutoencoderKL(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ).save_pretrained(tmp_path)
    images = lgt_evaluation.decode(torch.randn(2, 4, 8, 8), str(tmp_path))
    assert images.shape == (2, 16, 16, 3)
    assert 0 <= images.min() < images.max() <= 1
