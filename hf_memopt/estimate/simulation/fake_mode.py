"""torch's fake tensors, as a simulation of many thousand operations needs them."""

import inspect
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN_ARGUMENTS = {type(None), bool, int, float, torch.dtype, torch.device, torch.layout, torch.memory_format, str}
_TAKING_STORAGES = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)


class SimulatedTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes tensors fake, without torch's cache for operations on storages: its keys would keep the storages alive."""

    # Nothing is compiled in a simulation, and what keeps a mode from being compiled takes its time at each operation.
    __torch_dispatch__ = inspect.unwrap(FakeTensorMode.__torch_dispatch__)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        enabled = self.cache_enabled
        self.cache_enabled = enabled and func not in _TAKING_STORAGES
        try:
            return super().dispatch(func, types, args, kwargs)
        finally:
            self.cache_enabled = enabled

    def _prep_args_for_hash(self, result: list[object], args: Any, state: Any, id_hashed_objects: list[object]) -> None:
        """Append what torch's cache knows arguments by; torch's own way took a third of a simulation."""
        if type(args) is dict:
            result.append(tuple(args))
            args = list(args.values())
        result.append(len(args))
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor and arg.fake_mode is self and arg.constant is None and arg.layout is torch.strided:
                result.append(_facts(arg))
            elif kind in _PLAIN_ARGUMENTS:
                result += (kind, arg)
            elif kind is list or kind is tuple:
                result.append(kind)
                self._prep_args_for_hash(result, arg, state, id_hashed_objects)
            else:
                super()._prep_args_for_hash(result, (arg,), state, id_hashed_objects)

    def __deepcopy__(self, memo: Any) -> "SimulatedTensors":
        """Return the mode itself: a copied tensor, whose attributes are copied too, stays a tensor of this mode."""
        return self


def _facts(tensor: FakeTensor) -> tuple[object, ...]:
    """Return everything about a strided fake tensor that decides on the result of an operation."""
    memory = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
    flags = tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference(), tensor.is_quantized
    return memory, flags, tensor.dtype, tensor.fake_device
