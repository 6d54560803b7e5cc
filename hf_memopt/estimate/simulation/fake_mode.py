"""torch's fake tensors, as a simulation of many thousand operations needs them."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN_ARGUMENTS = {type(None), bool, int, float, torch.dtype, torch.device, torch.layout, torch.memory_format, str}
_VIEW, _UNSAFE_VIEW = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default
_TAKING_STORAGES = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)


class SimulatedTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes tensors fake, without torch's cache for operations on storages: its keys would keep the storages alive."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Attributes of fake tensors, by their device: the same for all that are made from the cache.
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    @property
    def avoid_device_init(self) -> bool:
        """`torch.tensor` makes tensors on the host and moves them: from torch 2.15 on it would ask the simulated
        device for memory."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled in a simulation, and torch's guard against compiling takes time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TAKING_STORAGES:
            return self._dispatch_impl(func, types, args, kwargs or {})
        # For other views of the same memory torch's cache is open.
        return self.dispatch(_VIEW if func is _UNSAFE_VIEW else func, types, args, kwargs)

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, key: Any, *call: Any) -> Any:
        """Make the key of a result in torch's cache; torch's own way took a fifth of a simulation.

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
        """Append the key of arguments in torch's cache; torch's own way took a third of a simulation."""
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
