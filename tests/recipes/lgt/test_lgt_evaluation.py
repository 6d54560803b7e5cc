"""LGT's panels, decoded by an autoencoder."""

from pathlib import Path

import pytest
import torch
from lgt_toys import tiny
from torch import Tensor

from hf_memopt.recipes.lgt import data as lgt_data
from hf_memopt.recipes.lgt import evaluation as lgt_evaluation
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
    assert list(columns) == ["content", "to style 0", "style 0", "to style 1", "style 1"]
    monkeypatch.setattr(lgt_evaluation, "decode", decode)
    decoded = lgt_evaluation.images_of(columns, config)
    assert seen == {"vae": (3, 4, 8, 8)}
    assert decoded["content"].shape == (3, 8, 8, 3)


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
