"""The images of `train_fluxflow.py`: drawn, in folders, or of any dataset, in batches of one shape each."""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from datasets.distributed import split_dataset_by_node
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hf_memopt.datasets_by_name import dataset_by_name
from hf_memopt.recipes.common.loop import pins_memory
from hf_memopt.recipes.fluxflow.options import MIN_LPIPS_SIZE, DataOptions, Options
from hf_memopt.recipes.landscapes.draw import landscape, painted

Size = tuple[int, int]  # width and height, as PIL has them

DRAWN_RATIOS = (3 / 4, 1.0, 4 / 3)


class Source(NamedTuple):
    samples: Any
    column: str
    buckets: list[Size]  # to which images are brought
    channels: int = 3  # or 1: gray


def load(options: DataOptions, stride: int, seed: int, channels: int = 3) -> Source:
    buckets = [bucket(options.resolution, ratio, stride) for ratio in options.aspect_ratios]
    if options.image_folder is None and options.dataset is None:
        return Source(drawn_images(options.num_drawn, options.resolution, seed), "image", buckets, channels)
    samples = _open(options)
    columns = samples.column_names  # None where a stream does not say
    if columns is not None and options.image_column not in columns:
        raise ValueError(f"image_column={options.image_column!r}: the dataset has the columns {', '.join(columns)}")
    samples = samples.select_columns(options.image_column)
    for sample in samples.take(1):
        in_8_bits(sample[options.image_column])
    return Source(samples, options.image_column, buckets, channels)


def _open(options: DataOptions) -> Any:
    # Images are read as they are: PIL's own conversion cuts off the values above 255 of other kinds.
    how: dict[str, Any] = {"streaming": options.streaming, "image_column": options.image_column}
    if options.dataset is not None:
        return dataset_by_name(options.dataset, options.split, options.dataset_config, **how)
    return dataset_by_name(str(options.image_folder), options.split, field="image_folder", kind="imagefolder", **how)


def describe(options: DataOptions) -> str:
    if options.image_folder is not None:
        return f"images in {options.image_folder}"
    if options.dataset is not None:
        return f"{options.dataset}, {options.split}" + (", streamed" if options.streaming else "")
    return f"{options.num_drawn:,} drawn images"


def bucket(resolution: int, ratio: float, stride: int) -> Size:
    """Return a size of about `resolution` squared pixels, sides in that ratio and multiples of the VAE's stride."""
    width, height = (resolution * math.sqrt(ratio), resolution / math.sqrt(ratio))
    return nearest_multiple(width, stride), nearest_multiple(height, stride)


def nearest_multiple(length: float, stride: int) -> int:
    return max(1, round(length / stride)) * stride


def check_sizes(options: Options, stride: int) -> None:
    """Refuse an aspect ratio whose images are too narrow for LPIPS at one of the resolutions."""
    if not options.losses.lpips_weight:
        return
    for ratio in options.data.aspect_ratios:
        whole = bucket(options.data.resolution, ratio, stride)
        for resolution in options.resolutions:
            width, height = (nearest_multiple(side * resolution / options.data.resolution, stride) for side in whole)
            if min(width, height) < MIN_LPIPS_SIZE:
                raise ValueError(
                    f"aspect_ratios={ratio:g}: at resolution {resolution} images are {width} x {height}, and LPIPS "
                    f"needs {MIN_LPIPS_SIZE} pixels on each side; use a ratio nearer to 1, larger resolutions, or "
                    "--lpips_weight 0"
                )


def rescaled(images: Tensor, scale: float, stride: int) -> Tensor:
    """Return images `(batch, channels, height, width)` at another resolution, sides still multiples of the stride."""
    size = [nearest_multiple(side * scale, stride) for side in images.shape[2:]]
    if size == list(images.shape[2:]):
        return images
    return torch.nn.functional.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)


# Gray values of 16 bits, by the order of their bytes, and kinds without a largest value.
_OF_16_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_BOUNDLESS = {"I": "32-bit integers", "F": "floating-point numbers"}


def in_8_bits(image: Image.Image) -> Image.Image:
    """Return an image of the same brightness whose pixels have 8 bits in each channel."""
    if image.mode in _OF_16_BITS:
        return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.mode in _BOUNDLESS:
        raise ValueError(
            f"an image has pixels of mode {image.mode!r} ({_BOUNDLESS[image.mode]}), of which nothing says what is "
            "white; save the images with 8 or 16 bits"
        )
    return image


def fitted(image: Image.Image, size: Size, channels: int = 3) -> Tensor:
    """Return an image scaled to cover `size`, the rest cropped on both sides alike, in [-1, 1].

    `(channels, height, width)`; one channel is gray.
    """
    upright = in_8_bits(ImageOps.exif_transpose(image)).convert("RGB" if channels == 3 else "L")
    pixels = np.array(ImageOps.fit(upright, size, Image.Resampling.LANCZOS)).reshape(size[1], size[0], channels)
    return torch.from_numpy(pixels).permute(2, 0, 1).float().div_(127.5).sub_(1)


class BucketBatches(IterableDataset[Tensor]):
    """Batches of images of one bucket each, `(batch_size, channels, height, width)`; the rest is left out."""

    def __init__(self, source: Source, batch_size: int) -> None:
        self._source = source
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[Tensor]:
        waiting: defaultdict[Size, list[Tensor]] = defaultdict(list)
        for sample in self._source.samples:
            image = sample[self._source.column]
            size = nearest_bucket(image, self._source.buckets)
            waiting[size].append(fitted(image, size, self._source.channels))
            if len(waiting[size]) == self._batch_size:
                yield torch.stack(waiting.pop(size))


def nearest_bucket(image: Image.Image, buckets: list[Size]) -> Size:
    width, height = ImageOps.exif_transpose(image).size
    return min(buckets, key=lambda size: abs(math.log(width / height) - math.log(size[0] / size[1])))


class EndlessBatches:
    """One epoch after the other, shuffled anew for each, by a loader with the same batches in the same order each time.

    `position` is the epoch, and how many of its batches have been given out. Going on in the middle of an epoch reads
    its first images once more.
    """

    def __init__(self, make_loader: Callable[[int], DataLoader[Tensor]], position: tuple[int, int] = (0, 0)) -> None:
        self._make_loader = make_loader
        self.position = position

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            epoch, num_taken = self.position
            number = 0
            for number, batch in enumerate(self._make_loader(epoch), start=1):
                if number > num_taken:
                    self.position = epoch, number
                    yield batch
            if not number:
                raise ValueError(
                    "batch_size: no bucket gets enough images for one batch; use smaller batches, fewer "
                    "--aspect_ratios, fewer --num_workers or more images"
                )
            self.position = epoch + 1, 0


def make_loader(source: Source, options: DataOptions, batch_size: int, seed: int, rank: int, ranks: int) -> Any:
    def loader(epoch: int) -> DataLoader[Tensor]:
        how = {"buffer_size": options.shuffle_buffer} if options.streaming else {"keep_in_memory": True}
        samples = split_dataset_by_node(source.samples.shuffle(seed=seed + epoch, **how), rank, ranks)
        if not options.streaming:
            samples = samples.to_iterable_dataset(num_shards=min(len(samples), max(1, options.num_workers)))
        return DataLoader(
            BucketBatches(source._replace(samples=samples), batch_size),
            batch_size=None,
            num_workers=options.num_workers,
            prefetch_factor=options.prefetch_factor,
            pin_memory=pins_memory(),
            generator=torch.Generator(),  # of its own: resuming must not shift the one that latents are drawn from
        )

    return loader


def panel_images(source: Source, options: DataOptions, seed: int, count: int = 6) -> list[Tensor]:
    """Return drawn ones that training has not seen; of other datasets the first ones, which it has."""
    if options.image_folder is None and options.dataset is None:
        source = source._replace(samples=drawn_images(count, options.resolution, seed + 1))
    return first_images(source, count)


def first_images(source: Source, count: int) -> list[Tensor]:
    size = source.buckets[0]
    first = zip(source.samples, range(count), strict=False)
    return [fitted(sample[source.column], size, source.channels) for sample, _ in first]


def drawn_images(count: int, resolution: int, seed: int) -> datasets.Dataset:
    numbers, images = random.Random(seed), []
    for _ in range(count):
        size = bucket(resolution, numbers.choice(DRAWN_RATIOS), stride=1)
        images.append(painted(landscape(size, numbers), numbers))
    features = datasets.Features({"image": datasets.Image(mode="RGB")})
    return datasets.Dataset.from_dict({"image": images}, features=features)
