from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import Workload
from estimate_runs import deviations, training
from late_imports import LateModule
from transformers_toys import BATCH, TOKENS, FolderOf, estimate, options_of

from hf_memopt.planning.models.model_batches import (
    Sample,
    image_batch,
    sequence_batch,
    spectrogram_batch,
    token_batch,
    waveform_batch,
    with_padding,
)

tasks = LateModule("hf_memopt.planning.models.tasks")
transformers = LateModule("transformers")


def test_tokens_are_their_own_labels() -> None:
    batch = token_batch(SimpleNamespace(model_type="llama"), 3, Sample(5))
    assert batch["labels"] is batch["input_ids"]
    assert (batch["labels"].shape, batch["labels"].dtype) == ((3, 5), torch.long)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({}, (2, 3, 224, 224)),
        ({"image_size": 8, "num_channels": 1}, (2, 1, 8, 8)),
        ({"image_size": (6, 4)}, (2, 3, 6, 4)),
        ({"vision_config": SimpleNamespace(image_size=8)}, (2, 3, 8, 8)),
    ],
)
def test_images_have_the_configurations_size(config: dict[str, object], shape: tuple[int, ...]) -> None:
    batch = image_batch(SimpleNamespace(model_type="vit", **config), 2, Sample(1))
    assert batch["pixel_values"].shape == shape
    assert batch["labels"].shape == (2,)


def test_siglip_2_gets_patches_of_square_images() -> None:
    vision = SimpleNamespace(num_patches=256, patch_size=4)
    batch = image_batch(SimpleNamespace(model_type="siglip2", vision_config=vision), 2, Sample(1))
    assert batch["pixel_values"].shape == (2, 256, 48)
    assert batch["spatial_shapes"].tolist() == [[16, 16]] * 2
    assert batch["pixel_attention_mask"].all()


def test_gemma_3_is_told_that_text_is_no_image() -> None:
    batch = token_batch(SimpleNamespace(model_type="gemma3"), 3, Sample(5))
    assert torch.equal(batch["token_type_ids"], torch.zeros(3, 5, dtype=torch.long))


def test_a_window_of_whisper_has_two_frames_for_each_position() -> None:
    config = SimpleNamespace(model_type="whisper", num_mel_bins=80, max_source_positions=1500)
    batch = spectrogram_batch(config, 2, Sample(5))
    assert (batch["input_features"].shape, batch["labels"].shape) == ((2, 80, 3000), (2, 5))


def test_wav2vec2_hears_twenty_milliseconds_in_a_frame() -> None:
    config = SimpleNamespace(conv_kernel=(10, 3, 3, 3, 3, 2, 2), conv_stride=(5, 2, 2, 2, 2, 2, 2))
    one, ten = (waveform_batch(config, 2, Sample(frames))["input_values"] for frames in (1, 10))
    assert one.shape == (2, 400)
    assert ten.shape == (2, 400 + 9 * 320)
    assert waveform_batch(config, 2, Sample(10))["labels"].shape == (2, 3)


def test_classes_of_sequences_have_one_label_each() -> None:
    assert sequence_batch(SimpleNamespace(model_type="llama"), 3, Sample(5))["labels"].shape == (3,)


def padded(folder: str, name: str) -> Callable[[torch.device], Any]:
    task, config = tasks.TASKS[name], transformers.AutoConfig.from_pretrained(folder)

    def build() -> Workload:
        model, batch = task.build(config, folder).train(), with_padding(task.batch(config, BATCH, Sample(40)))
        model.config.use_cache = False
        return Workload(model, lambda: model(**batch).loss)

    return training(build)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3", "causal"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("bert", "masked"),
                ("t5", "seq2seq"),
                ("bart", "seq2seq"),
                ("qwen3", "sequence-classification"),
            )
        ),
    ],
)
def test_padded_batches_take_what_they_take_in_a_real_run(model_type: str, name: str, folder_of: FolderOf) -> None:
    folder = folder_of(model_type, pad_token_id=0)
    assert max(map(abs, deviations(padded(folder, name)))) < 0.002


def test_a_mask_is_kept_for_backward(folder_of: FolderOf) -> None:
    """On this card attention without a mask runs in flash, and with one in the memory-efficient kernel."""
    folder = folder_of("qwen3", num_key_value_heads=4, num_attention_heads=4)
    plain, masked = (estimate(folder, precision="bf16", padding=padding) for padding in (False, True))
    assert (plain.assumptions, masked.assumptions) == ((), ())
    pairs = BATCH * TOKENS * TOKENS
    # A truth value for each pair of tokens, and the summand that the kernel takes instead in each of two layers.
    kept = masked.breakdown["activations"] - plain.breakdown["activations"]
    assert pairs < kept < 8 * pairs


def test_images_have_no_padding(folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match="padding=True: batches of task='image-classification' have no attention mask"):
        options_of(folder_of("vit"), padding=True)
