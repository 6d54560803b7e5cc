"""A device's memory counters without a device: operations charge the storages that they make."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_memopt.memory import DeviceMemory


class FakeCounters:
    """Counters that a test moves by hand; `timeline` holds the allocated bytes after each move."""

    def __init__(self, total_bytes: int = 2**20) -> None:
        self.total_bytes = total_bytes
        self.elsewhere_bytes = 0
        self.allocated_bytes = self.peak_bytes = self.reserved_bytes = 0
        self.inactive_split_bytes = self.num_alloc_retries = 0
        self.timeline = [0]
        self.num_reads = self.num_resets = self.num_queries = 0

    def move(self, num_bytes: int) -> None:
        self.allocated_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, self.allocated_bytes)
        self.timeline.append(self.allocated_bytes)

    def read(self) -> DeviceMemory:
        self.num_reads += 1
        return DeviceMemory(
            self.allocated_bytes,
            self.peak_bytes,
            self.reserved_bytes,
            self.inactive_split_bytes,
            self.num_alloc_retries,
        )

    def reset_peaks(self) -> None:
        self.num_resets += 1
        self.peak_bytes = self.allocated_bytes

    def free_and_total(self) -> tuple[int, int]:
        self.num_queries += 1
        return self.total_bytes - self.reserved_bytes - self.elsewhere_bytes, self.total_bytes


class CountedAllocator(FakeCounters, TorchDispatchMode):
    """Charges storages made inside of `with allocator:`, to the byte, until they die."""

    def __init__(self, total_bytes: int = 2**20) -> None:
        FakeCounters.__init__(self, total_bytes)
        TorchDispatchMode.__init__(self)
        self._charged: set[int] = set()

    def charge(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._charged:
                storage = tensor.untyped_storage()
                self._charged.add(storage._cdata)
                weakref.finalize(storage, self._discharge, storage._cdata, storage.nbytes())
                self.move(storage.nbytes())

    def leave_out(self, tensor: Tensor) -> None:
        """Leave out a storage whose memory is counted otherwise."""
        storage = tensor.untyped_storage()
        self._charged.add(storage._cdata)
        weakref.finalize(storage, self._charged.discard, storage._cdata)

    def _discharge(self, address: int, num_bytes: int) -> None:
        self._charged.discard(address)
        self.move(-num_bytes)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.charge(tree_leaves(result))
        return result
