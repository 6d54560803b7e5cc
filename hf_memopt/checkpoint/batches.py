"""Training batches in an order that their number alone decides, so that a run can go on anywhere."""

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from torch.utils.data import RandomSampler

from hf_memopt.ranges import COUNT_OR_ZERO


def endless_batches(accelerator: Accelerator, loader: Any, num_taken: int = 0) -> Iterator[Any]:
    """Yield the batches of one epoch after the other, from the one after the first `num_taken` on.

    Accelerate restores neither the epoch nor the position in it, and each new iterator over a loader draws a seed for
    its workers: from torch's global generator, which shifts dropout, unless the loader has a generator of its own,
    seeded with the epoch here. Skipped batches are not read.

    Random numbers that the dataset itself draws from global generators are not restored: the next batch is read before
    this one is given out. Let random augmentations depend on the sample's index and the epoch.

    Args:
        accelerator: that prepared `loader`; to shuffle, it needs `DataLoaderConfiguration(use_seedable_sampler=True)`.
        loader: prepared, of known length, made with `generator=torch.Generator()`.
        num_taken: number of this process's batches taken, over all epochs.

    Raises:
        ValueError: the loader is empty, has no generator of its own, or shuffles in an order that cannot be had again.
    """
    COUNT_OR_ZERO.check("num_taken", num_taken)
    _check(loader)
    epoch, num_skipped = divmod(num_taken, len(loader))
    while True:
        loader.generator.manual_seed(epoch)
        loader.set_epoch(epoch)
        yield from accelerator.skip_first_batches(loader, num_skipped) if num_skipped else loader
        epoch, num_skipped = epoch + 1, 0


def _check(loader: Any) -> None:
    if not len(loader):
        raise ValueError("loader is empty: it gives no batches; use smaller batches or more samples")
    if loader.generator is None:
        raise ValueError(
            "loader has no generator of its own, so every epoch would draw from the one that dropout uses; make "
            "it with DataLoader(..., generator=torch.Generator())"
        )
    sampler = get_sampler(loader)
    if isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler):
        raise ValueError(
            "loader shuffles in an order that cannot be restored; make the accelerator with "
            "DataLoaderConfiguration(use_seedable_sampler=True)"
        )
