from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from hf_memopt.checkpoint import endless_batches


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_go_on_wherever_they_were_left(num_workers: int) -> None:
    """Draw nothing from the global generator; workers draw alike from the beginnings of epochs on."""
    settings = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    whole = take(endless_batches(accelerator, loader_of(accelerator, num_workers)), 11)
    assert whole[:4] != whole[4:8]
    for num_taken in (4, 8) if num_workers else range(11):
        before = torch.get_rng_state()
        batches = endless_batches(accelerator, loader_of(accelerator, num_workers), num_taken)
        assert take(batches, 11 - num_taken) == whole[num_taken:]
        assert torch.equal(torch.get_rng_state(), before)


class Noisy(torch.utils.data.Dataset[float]):
    """Samples with random numbers of the worker that reads them."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> float:
        return index + torch.rand(()).item()


def test_loaders_that_cannot_be_resumed_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    data = torch.arange(4.0)
    loaders = {
        "has no generator of its own": DataLoader(data, shuffle=True),
        "cannot be restored; make the accelerator with": DataLoader(data, shuffle=True, generator=torch.Generator()),
        "loader is empty": DataLoader(data, 8, drop_last=True, generator=torch.Generator()),
    }
    for message, loader in loaders.items():
        with pytest.raises(ValueError, match=message):
            next(endless_batches(accelerator, accelerator.prepare(loader)))


def loader_of(accelerator: Accelerator, num_workers: int) -> Any:
    samples = Noisy(10) if num_workers else torch.arange(10.0)
    loader = DataLoader(samples, 3, shuffle=True, num_workers=num_workers, generator=torch.Generator())
    return accelerator.prepare(loader)


def take(batches: Iterator[Any], count: int) -> list[list[float]]:
    return [next(batches).tolist() for _ in range(count)]
