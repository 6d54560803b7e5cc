"""Frozen weights that come and go: what teachers ask of tensors, given to fake ones.

A teacher packs weights by their addresses, and points parameters at memory of another device and back. Fake tensors
have no addresses, and torch refuses to give them data of another device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_storage_address = torch.UntypedStorage.data_ptr
# Storages lie so far apart that none reaches the next. Python's integers have room for that.
_APART_BITS = 48


@contextmanager
def weights_come_and_go() -> Iterator[None]:
    """Fake tensors can be packed, rebound across devices and streamed by teachers, inside a simulation."""
    with (
        patch.object(FakeTensor, "data", property(Tensor.data.__get__, _rebind)),  # type: ignore[attr-defined]
        patch.object(FakeTensor, "data_ptr", _address),
        patch.object(torch.UntypedStorage, "data_ptr", _address_of_storage),
    ):
        yield


def replace_memory(tensor: Tensor, memory: Tensor) -> None:
    """What `tensor.data = memory` does, across devices: the tensor keeps its identity and gets a new implementation."""
    if isinstance(tensor, nn.Parameter):
        memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
    tensor.__class__, memory.__class__ = memory.__class__, tensor.__class__
    tensor.__dict__, memory.__dict__ = memory.__dict__, tensor.__dict__
    torch._C._swap_tensor_impl(tensor, memory)


def _rebind(tensor: Any, memory: Tensor) -> None:
    if tensor.device == memory.device:
        Tensor.data.__set__(tensor, memory)  # type: ignore[attr-defined]
    else:
        replace_memory(tensor, memory.detach())


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize)


def _address_of_storage(storage: torch.UntypedStorage) -> int:
    return storage._cdata << _APART_BITS if storage.device.type == "meta" else _storage_address(storage)


def as_seen_by(master: Tensor, device: torch.device) -> Tensor:
    """Return host memory as the device sees it: a tensor there with the same storage, which is counted once."""
    assert isinstance(master, FakeTensor)
    with _disable_current_modes():
        seen = torch.empty(0, dtype=master.dtype, device="meta")
        seen.set_(master.untyped_storage(), 0, master.size(), master.stride())
        return FakeTensor(master.fake_mode, seen, device)
