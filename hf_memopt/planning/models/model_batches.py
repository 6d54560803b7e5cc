"""Batches as a transformers model of a task takes them: zeros, in the sizes that its configuration says."""

import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

Batch = dict[str, Tensor]
# These refuse to train without the types of tokens: 1 for those of images.
WITH_TYPES = ("gemma3", "paligemma")
# The remedy where a command cannot tell how a model trains.
OWN_STEP = "write setup and step yourself and call hf_memopt.estimate_peak_memory"
_IMAGE_SIZE = re.compile(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?")


class Sample(NamedTuple):
    """The sizes of samples; None takes that of the model's configuration, or of a denoiser's script.

    Attributes:
        seq_len: tokens, those of images too; or frames of sound.
        image_size: height and width.
        dtype: dtype of latents and embeddings that were computed before.
        encoders: those beside a denoiser, as in `ModelOptions`.
    """

    seq_len: int
    num_images: int = 1
    image_size: tuple[int, int] | None = None
    dtype: torch.dtype = torch.float32
    text_tokens: int | None = None
    num_frames: int | None = None
    encoders: str = "off"
    passages: int = 1


def parse_image_size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = _IMAGE_SIZE.fullmatch(text)
    if not found:
        raise ValueError(f"image_size={text!r} must be pixels, such as 448, or height and width, such as 896x672")
    return int(found[1]), int(found[2] or found[1])


def pair(size: Any) -> tuple[int, int]:
    """Return height and width of a configuration's size, which may be one number for both."""
    return (size[0], size[-1]) if isinstance(size, list | tuple) else (size, size)


def with_padding(batch: Batch) -> Batch:
    """Add the attention mask of a collator that pads, as if samples were a token shorter."""
    num_samples, seq_len = batch["input_ids"].shape
    return batch | {"attention_mask": torch.tensor([[1] * (seq_len - 1) + [0]] * num_samples)}


def token_batch(config: Any, num_samples: int, sample: Sample) -> Batch:
    """Tokens without padding, which are their own labels: `(num_samples, seq_len)`."""
    tokens = torch.zeros(num_samples, sample.seq_len, dtype=torch.long)
    types = {"token_type_ids": torch.zeros_like(tokens)} if config.model_type in WITH_TYPES else {}
    return {"input_ids": tokens, "labels": tokens} | types


def image_batch(config: Any, num_samples: int, sample: Sample) -> Batch:
    """Images `(num_samples, channels, height, width)`, and a class for each.

    For SigLIP 2 patches `(num_samples, num_patches, numbers in each)` of square images, without padding.
    """
    vision = getattr(config, "vision_config", config)
    channels, labels = getattr(vision, "num_channels", 3), torch.zeros(num_samples, dtype=torch.long)
    if config.model_type == "siglip2":
        side = math.isqrt(vision.num_patches)
        return {
            "pixel_values": torch.zeros(num_samples, side * side, channels * vision.patch_size**2),
            "pixel_attention_mask": torch.ones(num_samples, side * side, dtype=torch.long),
            "spatial_shapes": torch.tensor([[side, side]] * num_samples),
            "labels": labels,
        }
    pixels = torch.zeros(num_samples, channels, *pair(getattr(vision, "image_size", 224)))
    return {"pixel_values": pixels, "labels": labels}


def sequence_batch(config: Any, num_samples: int, sample: Sample) -> Batch:
    """Tokens `(num_samples, seq_len)` without padding, and a class for each sample."""
    return token_batch(config, num_samples, sample) | {"labels": torch.zeros(num_samples, dtype=torch.long)}


def spectrogram_batch(config: Any, num_samples: int, sample: Sample) -> Batch:
    """Spectrograms of Whisper's whole window, `(num_samples, mel bins, frames)`, and tokens as labels."""
    if config.model_type != "whisper":
        raise ValueError(
            f"task='speech-seq2seq': model_type={config.model_type!r} does not say in its configuration how long its "
            f"inputs are, as whisper does; {OWN_STEP}"
        )
    features = torch.zeros(num_samples, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": features, "labels": torch.zeros(num_samples, sample.seq_len, dtype=torch.long)}


def waveform_batch(config: Any, num_samples: int, sample: Sample) -> Batch:
    """Sound `(num_samples, samples)` of which the encoder makes `seq_len` frames, and a label for each third."""
    if not (hasattr(config, "conv_kernel") and hasattr(config, "conv_stride")):
        raise ValueError(
            f"task='ctc': model_type={config.model_type!r} has no conv_kernel and conv_stride in its configuration, "
            f"which tell how much sound a frame is, as in wav2vec2; {OWN_STEP}"
        )
    length = sample.seq_len
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        length = (length - 1) * stride + kernel
    labels = torch.zeros(num_samples, max(1, sample.seq_len // 3), dtype=torch.long)
    return {"input_values": torch.zeros(num_samples, length), "labels": labels}
