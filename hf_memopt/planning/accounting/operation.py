"""An operation that has run, and the tensors in it."""

from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_memopt.autograd_state import unwrapped
from hf_memopt.weights.gradients import AwayGradient


class Operation(NamedTuple):
    function: Any
    args: Any
    kwargs: Any
    result: Any
    inputs: list[Tensor]
    outputs: list[Tensor]

    @classmethod
    def of(cls, function: Any, args: Any, kwargs: Any, result: Any) -> "Operation":
        return cls(function, args, kwargs, result, tensors_in((args, kwargs)), tensors_in(result))


def tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    # The most frequent first.
    if type(value) is FakeTensor:
        found.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Tensor) and not isinstance(value, AwayGradient):  # a wrapper, without memory
        found += unwrapped(value)  # the tensors with memory: quantised optimizer states, say, consist of others
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def device_kind(tensor: Tensor) -> str:
    """Return the type of a device without an operation, which `device` of a fake tensor would be."""
    device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device
    return str(device.type)


def named_arguments(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = (argument.name for argument in function._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


@cache
def name_of(function: Any) -> str:
    return str(function)
