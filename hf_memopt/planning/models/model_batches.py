"""Batches as a transformers model of a task takes them: zeros, in the sizes that its configuration says.

Beside text an image has a layout, as a vision-language model sees it: tensors and tokens. Their sizes and numbers are
the processor's choice (source: transformers 5.5), and a configuration tells them only for models with images of one
size. For the others the size is asked for that the processor brings an image to.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

Batch = dict[str, Tensor]
# These refuse to train without the types of tokens: 1 for those of images.
WITH_TYPES = ("gemma3", "paligemma")
# The remedy where a command cannot tell how a model trains.
OWN_STEP = "write setup and step yourself and call hf_memopt.estimate_peak_memory"
_IMAGE_SIZE = re.compile(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?")
Size = tuple[int, int]  # height and width
# These make positions in time, height and width number by number, which are given instead.
_WITH_POSITIONS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_NOT_LEARNED = -100


class Sample(NamedTuple):
    """The sizes of samples; None takes that of the model's configuration, or of a denoiser's script."""

    seq_len: int  # tokens, those of images too; or frames of sound
    num_images: int = 1
    image_size: Size | None = None
    dtype: torch.dtype = torch.float32  # of latents and embeddings that were computed before
    text_tokens: int | None = None
    num_frames: int | None = None
    encoders: str = "off"  # beside a denoiser, as in `ModelOptions`
    passages: int = 1


def parse_image_size(text: str | None) -> Size | None:
    if text is None:
        return None
    found = _IMAGE_SIZE.fullmatch(text)
    if not found:
        raise ValueError(f"image_size={text!r} must be pixels, such as 448, or height and width, such as 896x672")
    return int(found[1]), int(found[2] or found[1])


def pair(size: Any) -> Size:
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


# ------------------------------------------------------------------------------------------------- images beside text


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


@dataclass(frozen=True)
class ImageLayout:
    """An image, as a model gets it."""

    num_tokens: int  # placeholders in the text, each of which becomes a vector of the image
    # Called with the number of samples and of images in each; inputs of the model beside the text.
    tensors: Callable[[int, int], dict[str, Tensor]]
    description: str  # size and cut, in words


def image_layout(config: Any, size: Size | None) -> ImageLayout:
    """Return the layout of an image that the processor brings to `size`; None, to the configuration's."""
    if config.model_type not in LAYOUTS:
        raise ValueError(
            f"task='image-text-to-text': how many tokens an image of model_type={config.model_type!r} takes is its "
            f"processor's choice, which is known for {', '.join(LAYOUTS)}; {OWN_STEP}"
        )
    return LAYOUTS[config.model_type](config, size)


def _one_size(config: Any, size: Size | None) -> ImageLayout:
    """Return an image that is made as large as the vision tower wants it."""
    vision = config.vision_config
    if vision.model_type == "pixtral":
        raise ValueError(
            "task='image-text-to-text': images of a 'pixtral' vision tower have sizes of their own in a batch, which "
            f"are not simulated; {OWN_STEP}"
        )
    side, patches = _side(vision), _patches(vision)
    if size not in (None, (side, side)):
        raise ValueError(
            f"image_size={size[0]}x{size[1]}: every image of model_type={config.model_type!r} is made {side}x{side}; "
            "leave it out"
        )
    if config.model_type == "llava":
        patches += (vision.model_type == "clip_vision_model") - (config.vision_feature_select_strategy == "default")
    num_tokens = config.mm_tokens_per_image if config.model_type == "gemma3" else patches
    return ImageLayout(num_tokens, partial(_pixels, vision, 1), f"{side}x{side}")


def _tiles(config: Any, size: Size | None) -> ImageLayout:
    """Return tiles of the vision tower's size, with a small copy of the whole if they are several."""
    vision = config.vision_config
    side = _side(vision)
    height, width = _needed(config, size, f"the tiles of {side}x{side} that an image is cut into")
    num_tiles = math.ceil(height / side) * math.ceil(width / side)
    num_tiles += num_tiles > 1
    if config.model_type == "internvl":
        num_tokens = int(_patches(vision) * config.downsample_ratio**2)
        tensors = partial(_pixels, vision, num_tiles)
    else:
        num_tokens = _patches(vision) // config.scale_factor**2
        tensors = partial(_masked_pixels, vision, num_tiles)
    return ImageLayout(num_tiles * num_tokens, tensors, f"{height}x{width} in {num_tiles} tiles of {side}x{side}")


def _best_grid(config: Any, size: Size | None) -> ImageLayout:
    """Return the most fitting of a few grids of tiles, without the padding there."""
    from transformers.image_processing_utils import select_best_resolution  # brings torchao, which takes a second

    vision = config.vision_config
    side, in_tile = _side(vision), _side(vision) // pair(vision.patch_size)[0]
    height, width = _needed(config, size, "the grid of tiles that an image is cut into")
    best = select_best_resolution((height, width), config.image_grid_pinpoints)
    rows, columns = best[0] // side * in_tile, best[1] // side * in_tile
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    num_tiles = (best[0] // side) * (best[1] // side) + 1

    def tensors(num_samples: int, num_images: int) -> dict[str, Tensor]:
        number = num_samples * num_images
        flat = _pixels(vision, 1, number, num_tiles)["pixel_values"]
        sizes = torch.tensor([[height, width]] * number)
        return {"pixel_values": flat.view(number, num_tiles, *flat.shape[1:]), "image_sizes": sizes}

    num_tokens = _patches(vision) + rows * (columns + 1)  # each row ends with a token of its own
    return ImageLayout(num_tokens, tensors, f"{height}x{width} in {num_tiles} tiles of {side}x{side}")


def _patch_grid(config: Any, size: Size | None) -> ImageLayout:
    """Return an image that stays as it is, but for sides that are multiples of a few patches."""
    vision = config.vision_config
    patch, merged = pair(vision.patch_size)[0], vision.spatial_merge_size
    unit = patch * merged
    wanted = _needed(config, size, "the patches that an image is cut into")
    height, width = (max(unit, round(side / unit) * unit) for side in wanted)
    rows, columns = height // patch, width // patch
    in_patch = vision.in_channels * pair(vision.temporal_patch_size)[0] * patch**2

    def tensors(num_samples: int, num_images: int) -> dict[str, Tensor]:
        number = num_samples * num_images
        patches = torch.zeros(number * rows * columns, in_patch)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, rows, columns]] * number)}

    return ImageLayout(rows * columns // merged**2, tensors, f"{height}x{width} in {rows * columns} patches")


LAYOUTS: dict[str, Callable[[Any, Size | None], ImageLayout]] = {
    **dict.fromkeys(("llava", "paligemma", "gemma3"), _one_size),
    **dict.fromkeys(("idefics3", "smolvlm", "internvl"), _tiles),
    "llava_next": _best_grid,
    **dict.fromkeys(_WITH_POSITIONS, _patch_grid),
}


def _needed(config: Any, size: Size | None, what: str) -> Size:
    if size is None:
        raise ValueError(
            f"image_size=None: {what} are the choice of the processor of model_type={config.model_type!r}; give "
            "image_size, the height and width that it brings your images to, such as 896x672"
        )
    return size


def _pixels(vision: Any, num_tiles: int, num_samples: int, num_images: int) -> dict[str, Tensor]:
    """Return `(samples * images * tiles, channels, side, side)`."""
    number = num_samples * num_images * num_tiles
    return {"pixel_values": torch.zeros(number, _channels(vision), _side(vision), _side(vision))}


def _masked_pixels(vision: Any, num_tiles: int, num_samples: int, num_images: int) -> dict[str, Tensor]:
    """Return `(samples, images * tiles, channels, side, side)`, and a mask of its pixels."""
    side = _side(vision)
    pixels = torch.full((num_samples, num_images * num_tiles, _channels(vision), side, side), 0.5)
    mask = torch.ones(num_samples, num_images * num_tiles, side, side, dtype=torch.long)
    return {"pixel_values": pixels, "pixel_attention_mask": mask}


def _channels(vision: Any) -> int:
    return int(getattr(vision, "num_channels", 3))


def _side(vision: Any) -> int:
    return pair(vision.image_size)[0]


def _patches(vision: Any) -> int:
    return int(_side(vision) // pair(vision.patch_size)[0]) ** 2
