from itertools import islice
from pathlib import Path
from typing import Any

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
