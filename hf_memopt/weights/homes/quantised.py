"""Weights quantised with torchao or bitsandbytes: plain tensors inside a wrapper, which travel like all others."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_memopt.autograd_state import PARAMETER_TYPES, PLAIN_TYPES
from hf_memopt.transfer import Copier


def is_quantised(tensor: Tensor) -> bool:
    """Return whether this is one of torchao's wrappers, which list their inner tensors (`__tensor_flatten__`)."""
    return _is_from("torchao", tensor) and hasattr(tensor, "__tensor_flatten__")


def _is_from(library: str, tensor: Tensor) -> bool:
    return type(tensor).__module__.partition(".")[0] == library


def return_second_tensors(module: nn.Module) -> None:
    """Put `CB` back on weights in bitsandbytes' 8 bits, which the first call moves to the state of their layer."""
    for owner in module.modules():
        weight: Any = owner._parameters.get("weight")  # not what a parametrization computes
        state: Any = vars(owner).get("state")
        if weight is not None and _is_from("bitsandbytes", weight) and getattr(state, "CB", None) is not None:
            weight.CB, weight.SCB = state.CB, state.SCB


def inner_tensors(name: str, tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold a weight's bytes: itself, or those inside a quantised one.

    Raises ValueError for others: bitsandbytes keeps part of a weight in offsets that no interface lists, and a sharded
    weight's bytes are on other ranks.
    """
    if is_quantised(tensor):
        for field in _fields(tensor)[0]:
            yield from inner_tensors(f"{name}.{field}", getattr(tensor, field))
    elif type(tensor) in PLAIN_TYPES | PARAMETER_TYPES and tensor.layout is torch.strided and not tensor.is_meta:
        yield tensor
    else:
        raise ValueError(
            f"frozen weight {name!r} is a {type(tensor).__name__} with layout {tensor.layout} on {tensor.device}; "
            "only plain dense tensors and those quantised with torchao can be offloaded. Load the model without "
            "sharding, and unquantised or quantised with torchao."
        )


def stored_tensors(name: str, tensor: Any) -> Iterator[Tensor]:
    """Yield the plain tensors that hold a weight's large bytes, as `inner_tensors` does, and those of bitsandbytes.

    A weight in 8 bits has a second tensor on its bytes, `CB`. bitsandbytes' scales stay where they are: they are a few
    per cent, and no interface lists them.
    """
    if _is_from("bitsandbytes", tensor):
        yield tensor
        if getattr(tensor, "CB", None) is not None:
            yield tensor.CB
    else:
        yield from inner_tensors(name, tensor)


def claim_device(module: nn.Module, copier: Copier) -> None:
    """Replace each quantised weight by a wrapper on the copier's device, around the same bytes.

    A wrapper's device is fixed when it is made, while its inner tensors can be rebound. Operators ask the wrapper, and
    run where the inner tensors are.
    """
    replaced: dict[int, nn.Parameter] = {}
    borrowed: list[Tensor] = []
    for owner in module.modules():
        for name, weight in list(owner._parameters.items()):
            if weight is None or not is_quantised(weight):
                continue
            if id(weight) not in replaced:
                replaced[id(weight)] = _on_device(weight, copier, borrowed)
            owner._parameters[name] = replaced[id(weight)]
    for memory in borrowed:
        copier.release(memory)


def _on_device(weight: nn.Parameter, copier: Copier, borrowed: list[Tensor]) -> nn.Parameter:
    def empty(inner: Tensor) -> Tensor:
        block = copier.empty_device(inner.untyped_storage().nbytes())
        borrowed.append(block)
        return block.view(inner.dtype).as_strided(inner.size(), inner.stride(), inner.storage_offset())

    wrapper = nn.Parameter(rewrapped(weight, empty), requires_grad=False)
    for inside, outside in zip(inner_tensors("", wrapper), inner_tensors("", weight), strict=True):
        inside.data = outside.data
    return wrapper


def rewrapped(tensor: Tensor, replace: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a quantised weight with other plain tensors inside, on their device."""
    if not is_quantised(tensor):
        return replace(tensor)
    fields, context = _fields(tensor)
    inner = {field: rewrapped(getattr(tensor, field), replace) for field in fields}
    kind: Any = type(tensor)
    wrapper: Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return wrapper


def _fields(tensor: Any) -> tuple[list[str], Any]:
    fields: tuple[list[str], Any] = tensor.__tensor_flatten__()
    return fields
