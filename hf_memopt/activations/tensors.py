"""Tensors taken apart: memory, the view of it, and the count of in-place modifications."""

import torch
from torch import Tensor, UntypedStorage, nn
from torch._C._autograd import _unsafe_set_version_counter

from hf_memopt.transfer.plain import PLAIN_TYPES

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
        view = _blank(self._dtype, memory.device)
        view.set_(memory.untyped_storage(), self._offset, self._size, self._stride)
        if self._conj:
            view = torch._conj(view)
        return torch._neg_view(view) if self._neg else view


class StoragePin:
    """As long as it exists, no other storage is given this one's key, however dead this one is.

    torch's `StorageWeakRef`, without what that looks up each time: five times faster.
    """

    __slots__ = ("_reference",)

    _free = staticmethod(UntypedStorage._free_weak_ref)

    def __init__(self, storage: UntypedStorage) -> None:
        self._reference = storage._weak_ref()

    def __del__(self) -> None:
        self._free(self._reference)


class VersionGuard:
    """Notices in-place modification of a tensor without keeping its memory.

    A detached alias shares the version counter; giving it other data does not change that (canary-tested).

    Attributes:
        version: of the bytes that it guards.
    """

    __slots__ = ("_alias", "_shape", "version")

    def __init__(self, tensor: Tensor) -> None:
        self._alias = _alias_without_memory(tensor)
        self._shape = tensor.shape
        self.version = tensor._version

    def was_modified(self) -> bool:
        return self._alias._version != self.version

    def covers(self, tensor: Tensor) -> bool:
        """Whether a tensor of the same storage still has the bytes that are guarded.

        Equal version numbers alone say nothing: what `unsafe_chunk` returns lies in one storage, and each part counts
        its own modifications.
        """
        return tensor._version == self.version and same_counter(tensor, self._alias)

    def check(self) -> None:
        """Raise the error of autograd's own check, which saved-tensor hooks switch off."""
        if self._alias._version != self.version:
            raise modified_in_place(self._alias, self._shape, self.version)


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, `(num_bytes,)` uint8."""
    return _blank(torch.uint8, tensor.device).set_(tensor.untyped_storage())


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor or parameter is nothing but a strided view of a storage."""
    is_of_type = type(tensor) in PLAIN_TYPES or type(tensor) is nn.Parameter
    return is_of_type and tensor.layout is torch.strided and not tensor.is_nested


def same_counter(first: Tensor, second: Tensor) -> bool:
    """Whether in-place modifications of two tensors of equal version are counted together: tried, and taken back."""
    version = first._version
    _unsafe_set_version_counter((first,), (version + 1,))
    try:
        return second._version == version + 1
    finally:
        _unsafe_set_version_counter((first,), (version,))


def modified_in_place(tensor: Tensor, shape: torch.Size, expected: int) -> RuntimeError:
    """What autograd itself would raise, in its words."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(shape)}] is at version {tensor._version}; expected version {expected} instead. Hint: "
        "enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


def _alias_without_memory(tensor: Tensor) -> Tensor:
    alias = tensor.detach()
    alias.data = _no_data(tensor.dtype, tensor.device)
    return alias


def _blank(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor without memory, whose modifications are counted apart; `torch.empty(0)` takes thrice as long."""
    return _no_data(dtype, device).data


def _no_data(dtype: torch.dtype, device: torch.device) -> Tensor:
    found = _nothing.get((dtype, device))
    if found is None:
        with torch.inference_mode(False):
            found = _nothing[dtype, device] = torch.empty(0, dtype=dtype, device=device)
    return found
