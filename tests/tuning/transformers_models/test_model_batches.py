"""Batches have the sizes that a configuration says."""

from types import SimpleNamespace

import pytest
import torch

from hf_memopt.tuning.transformers_models.model_batches import image_batch, token_batch


def test_tokens_are_their_own_labels() -> None:
    batch = token_batch(SimpleNamespace(), 3, 5)
    assert batch["labels"] is batch["input_ids"]
    assert (batch["labels"].shape, batch["labels"].dtype) == ((3, 5), torch.long)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({}, (2, 3, 224, 224)),
        ({"image_size": 8, "num_channels": 1}, (2, 1, 8, 8)),
        ({"image_size": (6, 4)}, (2, 3, 6, 4)),
    ],
)
def test_images_have_the_configurations_size(config: dict[str, object], shape: tuple[int, ...]) -> None:
    batch = image_batch(SimpleNamespace(**config), 2, 0)
    assert batch["pixel_values"].shape == shape
    assert batch["labels"].shape == (2,)
