"""Tensors taken apart: memory, the view of it, and the count of in-place modifications."""

import torch
from torch import Tensor

_nothing: dict[tuple[torch.dtype, torch.device], Tensor] = {}


class ViewMeta:
    """Dtype, offset, size, stride and lazy bits of a tensor: what its storage's bytes do not say."""

    __slots__ = ("_conj", "_dtype", "_neg", "_offset", "_size", "_stride")

    def __init__(self, tensor: Tensor) -> None:
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._stride = tensor.size(), tensor.stride()
        self._conj, self._neg = tensor.is_conj(), tensor.is_neg()

    def of(self, memory: Tensor) -> Tensor:
        """The same view of other memory of the storage's size."""
        view = torch.empty(0, dtype=self._dtype, device=memory.device)
        view.set_(memory.untyped_storage(), self._offset, self._size, self._stride)
        view = torch._conj(view) if self._conj else view
        return torch._neg_view(view) if self._neg else view


class VersionGuard:
    """Notices in-place modification of a tensor without keeping its memory.

    A detached alias shares the version counter; giving it other data does not change that (canary-tested).
    """

    __slots__ = ("_alias", "_shape", "version")

    def __init__(self, tensor: Tensor) -> None:
        self._alias = _alias_without_memory(tensor)
        self._shape = tensor.shape
        self.version = tensor._version

    def was_modified(self) -> bool:
        return self._alias._version != self.version

    def check(self) -> None:
        """Raise the error of autograd's own check, which saved-tensor hooks switch off."""
        if self._alias._version != self.version:
            raise modified_in_place(self._shape)


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, `(num_bytes,)` uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def modified_in_place(shape: torch.Size) -> RuntimeError:
    """What autograd itself would raise."""
    return RuntimeError(
        f"a tensor of shape {tuple(shape)} that autograd saved for backward has been modified by an in-place "
        "operation; clone it before the modification, or modify a copy"
    )


def _alias_without_memory(tensor: Tensor) -> Tensor:
    alias = tensor.detach()
    alias.data = _no_data(tensor.dtype, tensor.device)
    return alias


def _no_data(dtype: torch.dtype, device: torch.device) -> Tensor:
    if (dtype, device) not in _nothing:
        _nothing[dtype, device] = torch.empty(0, dtype=dtype, device=device)
    return _nothing[dtype, device]
