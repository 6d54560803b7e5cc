"""Quick looks at what goes into and comes out of operations; there are tens of thousands in a simulated step."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dictionaries, as operations take and return them."""
    if isinstance(value, Tensor):
        yield from _with_memory(value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _with_memory(tensor: Any) -> Iterator[Tensor]:
    """The tensor, or those that it is made of: quantised optimizer states, say, have no memory of their own."""
    if type(tensor) is not FakeTensor and is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _with_memory(getattr(tensor, name))
    else:
        yield tensor


def device_type(tensor: Tensor) -> str:
    """Of real and fake tensors; asking a fake one for `device` is an operation of its own."""
    device = getattr(tensor, "fake_device", None) or tensor.device
    return str(device.type)
