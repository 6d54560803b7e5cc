"""A card of a given size that a CPU plays: allocations are charged, and more than it has is an error."""

import weakref

import torch
from counted_allocator import CountedAllocator
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from hf_memopt import SyncCopier
from hf_memopt.memory import DeviceMemory


class Card(CountedAllocator):
    """Charges storages inside of `with card:`, but no host memory of `copier`."""

    def __init__(self, total_bytes: int) -> None:
        super().__init__(total_bytes)
        self.num_ooms = 0
        self.copier = HostCopier(self)

    def move(self, num_bytes: int) -> None:
        if num_bytes > 0 and self.allocated_bytes + num_bytes > self.total_bytes - self.elsewhere_bytes:
            self.num_ooms += 1
            raise torch.OutOfMemoryError(f"{num_bytes} bytes more than the card has")
        super().move(num_bytes)
        self.reserved_bytes = self.allocated_bytes  # nothing is cached

    def read(self) -> DeviceMemory:
        memory = super().read()
        return DeviceMemory(
            memory.allocated_bytes, memory.peak_allocated_bytes, memory.reserved_bytes, num_ooms=self.num_ooms
        )

    def spare(self, memory: Tensor) -> None:
        """Never charge a tensor that is not on the card."""
        storage = memory.untyped_storage()
        self._charged.add(storage._cdata)
        weakref.finalize(storage, self._charged.discard, storage._cdata)

    def place(self, module: nn.Module) -> None:
        self.charge(module.parameters())


class HostCopier(SyncCopier):
    """A copier whose host memory is not on the card."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def empty_host(self, num_bytes: int) -> Tensor:
        with no_dispatch():
            memory = super().empty_host(num_bytes)
            self._card.spare(memory)
        return memory
