from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from late_imports import LateModule
from PIL import Image
from torch import Tensor

from hf_memopt.recipes.common.options import OffloadOptions
from hf_memopt.recipes.fluxflow.options import (
    DataOptions,
    LeverOptions,
    LossOptions,
    ModelOptions,
    Options,
    TrainingOptions,
)

pytestmark = pytest.mark.usefixtures("no_shared_cache")

fluxflow_data = LateModule("hf_memopt.recipes.fluxflow.data")

STRIDE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve wide and nine high images, whose red values tell their numbers."""
    path = tmp_path_factory.mktemp("images")
    for number in range(21):
        size = (48, 36) if number < 12 else (30, 45)
        Image.new("RGB", size, (number * 10, 0, 0)).save(path / f"{number:02}.png")
    return path


def options_of(folder: Path, **more: Any) -> DataOptions:
    return DataOptions(image_folder=str(folder), resolution=16, aspect_ratios=[0.75, 1.33], **more)


def endless(options: DataOptions, *, position: tuple[int, int] = (0, 0), rank: int = 0, ranks: int = 1) -> Any:
    source = fluxflow_data.load(options, STRIDE, seed=0)
    return fluxflow_data.EndlessBatches(fluxflow_data.make_loader(source, options, 3, 0, rank, ranks), position)


def numbers(batch: Tensor) -> list[int]:
    return [round((image[0].mean().item() + 1) * 12.75) for image in batch]


@pytest.mark.parametrize("streaming", [False, True])
def test_each_batch_has_one_shape_and_each_epoch_every_image_once(folder: Path, streaming: bool) -> None:
    batches = endless(options_of(folder, streaming=streaming))
    epochs = [list(islice(batches, 7)) for _ in range(2)]
    orders = []
    for epoch in epochs:
        assert {tuple(batch.shape) for batch in epoch} == {(3, 3, 12, 20), (3, 3, 20, 12)}
        orders.append([number for batch in epoch for number in numbers(batch)])
        assert sorted(orders[-1]) == list(range(21))
    assert orders[0] != orders[1]
    assert batches.position == (1, 7)


@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"num_workers": 2, "prefetch_factor": 1}])
@pytest.mark.sweep(share=0.3)
def test_a_position_is_gone_on_from(folder: Path, options: dict[str, Any]) -> None:
    whole = endless(options_of(folder, **options))
    taken: list[tuple[tuple[int, int], list[int]]] = []
    for batch in islice(whole, 10):
        taken.append((whole.position, numbers(batch)))
    for number in (2, 6, 8):
        again = endless(options_of(folder, **options), position=taken[number][0])
        assert numbers(next(iter(again))) == taken[number + 1][1]


def test_processes_share_an_epoch(folder: Path) -> None:
    of_ranks = [endless(options_of(folder), rank=rank, ranks=2) for rank in range(2)]
    found = [[n for batch in islice(batches, 2) for n in numbers(batch)] for batches in of_ranks]
    assert all(batches.position[0] == 0 for batches in of_ranks)
    assert len({*found[0], *found[1]}) == len(found[0]) + len(found[1])


def test_reading_draws_nothing_from_the_global_generator(folder: Path) -> None:
    before = torch.random.get_rng_state()
    list(islice(endless(options_of(folder, num_workers=1)), 8))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_images_go_to_the_bucket_of_the_nearest_ratio() -> None:
    buckets = [fluxflow_data.bucket(64, ratio, 8) for ratio in (0.5, 1.0, 2.0)]
    assert buckets == [(48, 88), (64, 64), (88, 48)]
    for size, expected in (((10, 10), 1), ((130, 100), 1), ((145, 100), 2), ((100, 145), 0)):
        assert fluxflow_data.nearest_bucket(Image.new("RGB", size), buckets) == buckets[expected]
    turned = Image.new("RGB", (200, 100))
    turned.getexif()[0x0112] = 6  # taken with the camera on its side
    assert fluxflow_data.nearest_bucket(turned, buckets) == buckets[0]


def test_images_cover_their_bucket_and_lose_both_sides_alike() -> None:
    image = Image.new("RGB", (40, 10), (255, 255, 255))
    image.paste((0, 0, 0), (15, 0, 25, 10))
    found = fluxflow_data.fitted(image, (10, 10))
    assert found.shape == (3, 10, 10)
    assert found[:, :, 1:-1].max() == -1


def test_other_resolutions_are_multiples_of_the_stride() -> None:
    images = torch.rand(2, 3, 88, 48)
    assert fluxflow_data.rescaled(images, 1.0, 8) is images
    assert fluxflow_data.rescaled(images, 0.5, 8).shape == (2, 3, 48, 24)
    assert fluxflow_data.rescaled(images, 0.01, 8).shape == (2, 3, 8, 8)


def test_drawn_images_are_decided_by_the_seed() -> None:
    def pixels(seed: int) -> list[Tensor]:
        return fluxflow_data.first_images(
            fluxflow_data.Source(fluxflow_data.drawn_images(3, 32, seed), "image", [(32, 32)]), 3
        )

    assert all(map(torch.equal, pixels(0), pixels(0)))
    assert not any(map(torch.equal, pixels(0), pixels(1)))
    assert len({tuple(image.flatten().tolist()) for image in pixels(0)}) == 3


def test_an_epoch_without_a_batch_is_an_error(folder: Path) -> None:
    source = fluxflow_data.load(options_of(folder), STRIDE, seed=0)
    batches = fluxflow_data.EndlessBatches(fluxflow_data.make_loader(source, options_of(folder), 13, 0, 0, 1))
    with pytest.raises(ValueError, match="batch_size: no bucket gets enough images for one batch; use smaller"):
        next(iter(batches))


def test_a_dataset_that_is_not_there_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="image_column='picture': the dataset has the columns image"):
        fluxflow_data.load(options_of(folder, image_column="picture"), STRIDE, seed=0)
    with pytest.raises(ValueError, match=r"image_folder='.*nowhere' cannot be loaded"):
        fluxflow_data.load(options_of(tmp_path / "nowhere"), STRIDE, seed=0)


def test_ratios_that_lpips_cannot_take_are_refused() -> None:
    def check(ratios: list[float], *, resolutions: list[int], weight: float = 1.0) -> None:
        data = DataOptions(resolution=64, aspect_ratios=ratios)
        training = TrainingOptions(resolutions=resolutions)
        losses = LossOptions(lpips_weight=weight)
        fluxflow_data.check_sizes(
            Options(ModelOptions(), data, losses, training, LeverOptions(), OffloadOptions()), STRIDE
        )

    check([0.5, 1.0, 2.0], resolutions=[64, 32])
    check([0.05, 20.0], resolutions=[64], weight=0)
    with pytest.raises(ValueError, match=r"aspect_ratios=30: at resolution 64 images are 352 x 12, and LPIPS needs 16"):
        check([1.0, 30.0], resolutions=[64])
    with pytest.raises(ValueError, match=r"aspect_ratios=0.25: at resolution 24 images are 12 x 48.*--lpips_weight 0"):
        check([1.0, 0.25], resolutions=[64, 24])


def test_drawn_images_have_every_ratio() -> None:
    images = fluxflow_data.drawn_images(20, 64, 0)["image"]
    assert {image.size for image in images} == {(55, 74), (64, 64), (74, 55)}


def shades(number_type: Any, largest: float) -> Any:
    """Return a gray ramp of 32 x 32 pixels from black to white."""
    return (np.arange(32 * 32).reshape(32, 32) // 4 / 255 * largest).astype(number_type)


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_images_of_16_bits_are_as_bright_as_those_of_8(suffix: str, tmp_path: Path) -> None:
    found = {}
    for bits, kind, largest in ((8, np.uint8, 255), (16, np.uint16, 65535)):
        (tmp_path / f"{bits}").mkdir()
        Image.fromarray(shades(kind, largest)).save(tmp_path / f"{bits}" / f"ramp.{suffix}")
        options = DataOptions(image_folder=str(tmp_path / f"{bits}"), resolution=32)
        (found[bits],) = fluxflow_data.first_images(fluxflow_data.load(options, STRIDE, 0), 1)
    assert torch.equal(found[8], found[16])
    assert (found[16].min(), found[16].max()) == (-1, 1)


@pytest.mark.parametrize("order", ["I;16", "I;16B"])
def test_either_order_of_bytes_is_read(order: str) -> None:
    image = Image.frombytes(order, (2, 1), b"\x00\x00\xff\xff")
    assert fluxflow_data.fitted(image, (2, 1)).flatten().tolist() == [-1, 1] * 3


@pytest.mark.parametrize(
    ("kind", "largest", "said"),
    [
        (np.float32, 1.0, r"mode 'F' \(floating-point numbers\)"),
        (np.int32, 2**31 - 1, r"mode 'I' \(32-bit integers\)"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_images_whose_white_is_not_known_are_refused_at_the_start(
    kind: Any, largest: float, said: str, streaming: bool, tmp_path: Path
) -> None:
    Image.fromarray(shades(kind, largest)).save(tmp_path / "ramp.tiff")
    with pytest.raises(ValueError, match=f"an image has pixels of {said}, of which nothing says what is white"):
        fluxflow_data.load(DataOptions(image_folder=str(tmp_path), streaming=streaming), STRIDE, 0)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_kinds_of_8_bits_are_read_as_pil_converts_them(mode: str) -> None:
    image = Image.fromarray(shades(np.uint8, 255)).convert("RGB").convert(mode)
    for channels, wanted in ((3, "RGB"), (1, "L")):
        found = fluxflow_data.fitted(image, (32, 32), channels)
        expected = np.array(image.convert(wanted)).reshape(32, 32, channels)
        assert torch.equal(((found + 1) * 127.5).round(), torch.from_numpy(expected).permute(2, 0, 1).float())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_saved_to_disk_is_read(folder: Path, streaming: bool, tmp_path: Path) -> None:
    images = fluxflow_data.datasets.load_dataset("imagefolder", data_dir=str(folder), split="train")
    images.save_to_disk(tmp_path / "one")
    fluxflow_data.datasets.DatasetDict({"train": images, "test": images.take(3)}).save_to_disk(tmp_path / "split")

    def numbers_in(name: str, **more: Any) -> list[int]:
        options = DataOptions(dataset=str(tmp_path / name), resolution=16, streaming=streaming, **more)
        return numbers(torch.stack(fluxflow_data.first_images(fluxflow_data.load(options, STRIDE, 0), 30)))

    assert numbers_in("one") == numbers_in("split") == list(range(21))
    assert numbers_in("split", split="test") == [0, 1, 2]
    with pytest.raises(ValueError, match=r"split='valid': it has train, test"):
        numbers_in("split", split="valid")
