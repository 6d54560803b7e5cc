"""Batches have the sizes that a configuration says."""

from types import SimpleNamespace

import pytest
import torch

from hf_memopt.tuning.transformers_models.model_batches import (
    image_batch,
    sequence_batch,
    spectrogram_batch,
    token_batch,
    waveform_batch,
)


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


def test_a_window_of_whisper_has_two_frames_for_each_position() -> None:
    config = SimpleNamespace(model_type="whisper", num_mel_bins=80, max_source_positions=1500)
    batch = spectrogram_batch(config, 2, 5)
    assert (batch["input_features"].shape, batch["labels"].shape) == ((2, 80, 3000), (2, 5))


def test_wav2vec2_hears_twenty_milliseconds_in_a_frame() -> None:
    config = SimpleNamespace(conv_kernel=(10, 3, 3, 3, 3, 2, 2), conv_stride=(5, 2, 2, 2, 2, 2, 2))
    one, ten = (waveform_batch(config, 2, frames)["input_values"] for frames in (1, 10))
    assert one.shape == (2, 400)
    assert ten.shape == (2, 400 + 9 * 320)
    assert waveform_batch(config, 2, 10)["labels"].shape == (2, 3)


def test_classes_of_sequences_have_one_label_each() -> None:
    assert sequence_batch(SimpleNamespace(), 3, 5)["labels"].shape == (3,)
