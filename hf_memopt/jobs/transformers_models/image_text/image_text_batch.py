"""Batches of images and text."""

from typing import Any

import torch

from hf_memopt.jobs.transformers_models.image_text.image_layouts import image_layout
from hf_memopt.jobs.transformers_models.model_batches import WITH_TYPES, Batch, Sample

# These make positions in time, height and width number by number, which are given instead.
_WITH_POSITIONS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_NOT_LEARNED = -100


def describe_images(config: Any, sample: Sample) -> str:
    layout = image_layout(config, sample.image_size)
    # A token of text ends each image, and one more is there to be learned.
    needed = sample.num_images * (layout.num_tokens + 1) + 1
    if sample.seq_len < needed:
        raise ValueError(
            f"seq_len={sample.seq_len} has no room for images_per_sample={sample.num_images} of {layout.num_tokens} "
            f"tokens each; use at least {needed}"
        )
    images = "1 image" if sample.num_images == 1 else f"{sample.num_images} images"
    return f"with {images} of {layout.description} per sample, {layout.num_tokens} of its tokens each"


def image_text_batch(config: Any, num_samples: int, sample: Sample) -> Batch:
    """Return tokens `(num_samples, seq_len)`, of which the first part stands for images, and the images.

    There is a mask, as all processors make one; nothing is hidden. Which text is learned is not known: all is.
    """
    layout = image_layout(config, sample.image_size)
    image_token = config.image_token_id
    text_token = int(image_token == 0)
    images = ([True] * layout.num_tokens + [False]) * sample.num_images
    is_image = images + [False] * (sample.seq_len - len(images))
    ids = [image_token if each else text_token for each in is_image]
    labels = [_NOT_LEARNED if each else text_token for each in is_image]
    batch = {
        "input_ids": torch.tensor([ids] * num_samples),
        "attention_mask": torch.tensor([[1] * sample.seq_len] * num_samples),
        "labels": torch.tensor([labels] * num_samples),
    }
    if config.model_type in WITH_TYPES:
        batch["token_type_ids"] = torch.tensor([list(map(int, is_image))] * num_samples)
    if config.model_type in _WITH_POSITIONS:
        batch["position_ids"] = torch.zeros(3, num_samples, sample.seq_len, dtype=torch.long)
    return batch | layout.tensors(num_samples, sample.num_images)
