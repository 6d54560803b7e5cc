"""torch's fake tensors, as a simulation of many thousand operations needs them."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN_ARGUMENTS = {type(None), bool, int, float, torch.dtype, torch.device, torch.layout, torch.memory_format, str}
_VIEW, _UNSAFE_VIEW = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default
_TAKING_STORAGES = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)


class SimulatedTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes tensors fake, without torch's cache for operations on storages: its keys would keep these alive."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Of all fake tensors that are made from the cache, by device.
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @property
    def avoid_device_init(self) -> bool:
        """True: from torch 2.15 on, `torch.tensor` would else ask the simulated device for memory."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TAKING_STORAGES:
            return self._dispatch_impl(func, types, args, kwargs or {})
        # torch's cache is open for other views of the same memory.
        return self.dispatch(_VIEW if func is _UNSAFE_VIEW else func, types, args, kwargs)

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, key: Any, *call: Any) -> Any:
        """Make a result from torch's cache; torch's own way took a fifth of a simulation.

        A call is an operation and its arguments, from torch 2.15 on its arguments alone.
        """
        known = entry.metadata
        if known is None or known.is_conj or known.is_neg:
            return super()._get_output_tensor_from_cache_entry(state, entry, key, *call)
        empty = torch.empty_strided(
            known.shape, known.stride, dtype=known.dtype, device="meta", requires_grad=known.requires_grad
        )
        if entry.view_idx is not None:
            empty.set_(call[-1][entry.view_idx].untyped_storage(), known.storage_offset, known.shape, known.stride)
        if known.device not in self._attributes:
            made = FakeTensor(self, empty, known.device)
            self._attributes[known.device] = dict(vars(made))
            return made
        made = torch.Tensor._make_subclass(
            FakeTensor, empty, known.requires_grad, dispatch_device=True, device_for_backend_keys=known.device
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
        vars(made).update(self._attributes[known.device])
        return made

    def _prep_args_for_hash(self, result: list[object], args: Any, state: Any, id_hashed_objects: list[object]) -> None:
        """As torch does; its own way took a third of a simulation."""
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
        """Return the mode itself, so that a copied tensor, whose attributes are copied too, stays one of this mode."""
        return self


def _facts(tensor: FakeTensor) -> tuple[object, ...]:
    """Return everything about a strided tensor that decides on the result of an operation."""
    memory = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
    flags = tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference(), tensor.is_quantized
    return memory, flags, tensor.dtype, tensor.fake_device
