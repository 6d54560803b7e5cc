"""Quick looks at what goes into and comes out of operations; there are tens of thousands in a simulated step."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dictionaries, as operations take and return them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def device_type(tensor: Tensor) -> str:
    """Of real and fake tensors; asking a fake one for `device` is an operation of its own."""
    device = getattr(tensor, "fake_device", None) or tensor.device
    return str(device.type)
