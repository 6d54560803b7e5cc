"""Batches of images and text, and the memory of their steps."""

from collections.abc import Callable
from typing import Any

import pytest
import transformers_toys
from architectures import Workload
from estimate_runs import estimated_peaks, real_peaks, step, training
from transformers_toys import BATCH, FolderOf, built, estimate
from vision_language_toys import CONFIGS, IMAGE_TOKEN, SIZES

from hf_memopt.planning import estimate_peak_memory

SEQ_LEN, IMAGES = 160, 2


def options_of(folder: str, model_type: str, **changes: Any) -> Any:
    settings = {"seq_len": SEQ_LEN, "images_per_sample": IMAGES, "image_size": SIZES.get(model_type)}
    return transformers_toys.options_of(folder, batch_size=BATCH, **{**settings, **changes})


ADAPTERS: dict[str, Any] = {"lora_rank": 4, "freeze_vision_tower": True}
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({}, "none"),
    "checkpointed": ({}, "full"),
    "LoRA": ({"lora_rank": 4}, "none"),
    "LoRA beside a frozen tower, checkpointed": (ADAPTERS, "full"),
    "padded": ({"padding": True}, "none"),
}
QUICK = {("llava", "LoRA beside a frozen tower, checkpointed"), ("qwen2_5_vl", "full")}


@pytest.mark.parametrize(
    ("model_type", "variant"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in ((model_type, variant) for model_type in CONFIGS for variant in VARIANTS)
    ],
)
@pytest.mark.sweep(share=0.5)
def test_the_peaks_of_a_real_run(model_type: str, variant: str, folder_of: FolderOf) -> None:
    """Compare to the byte; Qwen's positions, made from the types of tokens in a real run, may count once too often."""
    changes, checkpointing = VARIANTS[variant]
    options = options_of(folder_of(model_type), model_type, **changes)
    is_qwen = model_type.startswith("qwen")

    def building(with_types: bool) -> Callable[[], Workload]:
        def build() -> Workload:
            model = built(options, checkpointing, "cpu")
            batch = options.batch(options.config, BATCH)
            if with_types:
                del batch["position_ids"]
                batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).int()
            return Workload(model, lambda: model(**batch).loss)

        return build

    estimated = estimated_peaks(estimate_peak_memory(training(building(False)), step, like="cpu"))
    real = real_peaks(training(building(is_qwen)))
    positions = 3 * BATCH * SEQ_LEN * 8 if is_qwen else 0
    for guess, found in zip(estimated, real, strict=True):
        assert 0 <= guess - found <= positions


def test_images_are_named_and_come_before_text(folder_of: FolderOf) -> None:
    options = options_of(folder_of("qwen2_5_vl"), "qwen2_5_vl")
    described = options.kind_of_task.describe(options.config, options.sample)
    assert described == "with 2 images of 48x32 in 96 patches per sample, 24 of its tokens each"
    batch = options.batch(options.config, BATCH)
    is_image = batch["input_ids"] == IMAGE_TOKEN
    assert is_image.sum(dim=1).tolist() == [IMAGES * 24] * BATCH
    assert is_image[0, : 2 * 25].tolist() == ([True] * 24 + [False]) * 2
    assert (batch["labels"] == -100).equal(is_image)
    assert batch["attention_mask"].all()


def test_samples_have_room_for_their_images(folder_of: FolderOf) -> None:
    with pytest.raises(ValueError, match=r"seq_len=50 has no room for images_per_sample=2 of 24 tokens .* at least 51"):
        options_of(folder_of("qwen2_5_vl"), "qwen2_5_vl", seq_len=50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": "32,32"}, "image_size='32,32' must be pixels, such as 448, or height and width"),
        ({"images_per_sample": 0}, "images_per_sample=0 must be at least 1"),
        ({"task": "causal", "image_size": "32"}, "image_size='32' means nothing to task='causal'"),
        ({"task": "causal", "freeze_vision_tower": True}, "freeze_vision_tower=True means nothing to task='causal'"),
        ({"seq_len": 10**6}, "longer than the model's max_position_embeddings"),
    ],
)
def test_options_of_images_are_checked(changes: dict[str, Any], message: str, folder_of: FolderOf) -> None:
    settings = {"image_size": None, "images_per_sample": 1, **changes}
    with pytest.raises(ValueError, match=message):
        options_of(folder_of("gemma3"), "gemma3", **settings)


def test_everything_can_be_offloaded(folder_of: FolderOf) -> None:
    folder = folder_of("llava")
    kept = estimate(folder, precision="bf16")
    assert kept.assumptions == ()
    offloaded = estimate(folder, offload="all", precision="bf16")
    assert offloaded.host_bytes > kept.host_bytes
