"""An operation that has run, and the tensors in it."""

from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Operation(NamedTuple):
    """An operation that has run.

    Attributes:
        function: the operation that was called.
        args: positional arguments.
        kwargs: keyword arguments.
        result: the return value.
        inputs: the tensors in `args` and `kwargs`.
        outputs: the tensors in `result`.
    """

    function: Any
    args: Any
    kwargs: Any
    result: Any
    inputs: list[Tensor]
    outputs: list[Tensor]

    @classmethod
    def of(cls, function: Any, args: Any, kwargs: Any, result: Any) -> "Operation":
        """Collect the tensors."""
        return cls(function, args, kwargs, result, tensors_in((args, kwargs)), tensors_in(result))


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries, as operations take and return them."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    # Asked for everything that operations take and return: the most frequent is asked for first.
    if type(value) is FakeTensor:
        found.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Tensor):
        _collect_parts(value, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def _collect_parts(tensor: Any, found: list[Tensor]) -> None:
    """Add the tensor, or those that it is made of: quantised optimizer states, say, have no memory of their own."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            _collect(getattr(tensor, name), found)
    else:
        found.append(tensor)


def device_kind(tensor: Tensor) -> str:
    """Return the type of a tensor's device; asking a fake tensor for `device` would be an operation of its own."""
    device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device
    return str(device.type)


@cache
def name_of(function: Any) -> str:
    """Return an operation's name, such as "aten.mm.default"."""
    return str(function)
