"""Batches in parts."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from hf_memopt.ranges import COUNT


def split_batch(batch: Any, micro_batch_size: int) -> Iterator[Any]:
    """Yield the batch's samples in their order, `micro_batch_size` at a time; the last part may be smaller.

    Tensors are cut along their first dimension, as views, and lists of anything but containers by item, wherever they
    are in tuples, lists and mappings. Tensors `()`, strings, numbers and None go into each part as they are.

    Raises:
        ValueError: no tensor with samples, different numbers of them, or `micro_batch_size` is no count.
    """
    COUNT.check("micro_batch_size", micro_batch_size)
    for start in range(0, num_samples(batch), micro_batch_size):
        yield take(batch, slice(start, start + micro_batch_size))


def num_samples(batch: Any) -> int:
    sizes = set(_sizes(batch))
    if len(sizes) != 1:
        found = f"with {sorted(sizes)} samples" if sizes else "without samples"
        raise ValueError(f"batch: tensors and lists {found}; give all of them the same first dimension")
    return sizes.pop()


def take(batch: Any, rows: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[rows] if batch.ndim else batch
    if _has_samples(batch):
        return batch[rows] if isinstance(rows, slice) else [batch[row] for row in rows]
    if isinstance(batch, Mapping):
        return type(batch)({key: take(each, rows) for key, each in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        parts = [take(each, rows) for each in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _sizes(batch: Any) -> Iterator[int]:
    if _has_samples(batch):
        yield len(batch)
    elif isinstance(batch, Mapping | list | tuple):
        for each in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _sizes(each)


def _has_samples(value: Any) -> bool:
    if isinstance(value, list):
        return not any(isinstance(each, Tensor | Mapping | list | tuple) for each in value)
    return isinstance(value, Tensor) and value.ndim > 0
