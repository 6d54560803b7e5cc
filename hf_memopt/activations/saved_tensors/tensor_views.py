"""Tensors taken apart: memory, the view of it, and the count of in-place modifications."""

from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._C._autograd import _unsafe_set_version_counter

from hf_memopt.transfer.device_types import PLAIN_TYPES


class _Empty(dict[tuple[torch.dtype, torch.device], Tensor]):
    """Tensors without memory, made when they are first asked for. Their `.data` is a new one, whose modifications are
    counted apart, in a third of the time of `torch.empty(0)`."""

    def __missing__(self, key: tuple[torch.dtype, torch.device]) -> Tensor:
        with torch.inference_mode(False):
            self[key] = torch.empty(0, dtype=key[0], device=key[1])
        return self[key]


_EMPTY = _Empty()


class ViewMeta:
    """Dtype, offset, size, stride and lazy bits of a tensor: what its storage's bytes do not say."""

    __slots__ = ("_conj", "_dtype", "_neg", "_offset", "_size", "_stride")

    def __init__(self, tensor: Tensor) -> None:
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._stride = tensor.size(), tensor.stride()
        self._conj, self._neg = tensor.is_conj(), tensor.is_neg()

    def of(self, memory: Tensor) -> Tensor:
        """The same view of other memory of the storage's size."""
        view = _EMPTY[self._dtype, memory.device].data
        view.set_(memory.untyped_storage(), self._offset, self._size, self._stride)
        if self._conj:
            view = torch._conj(view)
        return torch._neg_view(view) if self._neg else view


class StoragePin(int):
    """As long as it exists, no other storage is given this one's key, however dead this one is.

    The weak reference's own number, which it frees. torch's `StorageWeakRef` takes five times as long.
    """

    __slots__ = ()

    _free = staticmethod(UntypedStorage._free_weak_ref)

    @classmethod
    def of(cls, storage: UntypedStorage) -> "StoragePin":
        reference: Any = storage._weak_ref()
        return cls(reference)

    def __del__(self) -> None:
        self._free(self)


class VersionGuard:
    """Notices in-place modification of a tensor without keeping its memory.

    A detached alias shares the version counter; giving it other data does not change that (canary-tested).

    Attributes:
        alias: shares the tensor's version counter.
        version: of the bytes that it guards.
    """

    __slots__ = ("alias", "shape", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.alias = _alias_without_memory(tensor)
        self.shape = tensor.shape
        self.version = tensor._version

    def twin(self) -> "VersionGuard":
        """A guard of the same bytes and nothing more."""
        twin = VersionGuard.__new__(VersionGuard)
        twin.alias, twin.shape, twin.version = self.alias, self.shape, self.version
        return twin

    def was_modified(self) -> bool:
        return self.alias._version != self.version

    def covers(self, tensor: Tensor) -> bool:
        """Whether a tensor of the same storage still has the bytes that are guarded.

        Equal version numbers alone say nothing: what `unsafe_chunk` returns lies in one storage, and each part counts
        its own modifications.
        """
        return tensor._version == self.version and same_counter(tensor, self.alias)

    def check(self) -> None:
        """Raise the error of autograd's own check, which saved-tensor hooks switch off."""
        if self.alias._version != self.version:
            raise modified_in_place(self.alias, self.shape, self.version)


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, `(num_bytes,)` uint8."""
    return _EMPTY[torch.uint8, tensor.device].data.set_(tensor.untyped_storage())


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
    alias.data = _EMPTY[tensor.dtype, tensor.device]
    return alias
