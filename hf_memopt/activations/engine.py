"""Copies from one device: its host memory, what is stored there, and what is on its way."""

import weakref
from collections import deque

from torch import Tensor

from hf_memopt.activations.residency import Residency
from hf_memopt.activations.schedule import ForwardPass, ReloadOrders
from hf_memopt.activations.storages import KeptStorage, LiveStorage, OffloadedStorage
from hf_memopt.activations.tensors import VersionGuard
from hf_memopt.transfer import Copier
from hf_memopt.transfer.clock import Clock
from hf_memopt.transfer.host_arena import HostArena


class Engine:
    """The state that all forward passes on one device share.

    Args:
        copier: moves the bytes.
        clock: the compute stream's.
        host_budget_bytes: of the arena.
    """

    def __init__(self, copier: Copier, clock: Clock, host_budget_bytes: int | None) -> None:
        self.copier = copier
        self.clock = clock
        self.arena = HostArena(copier, host_budget_bytes)
        self.residency = Residency()
        self.orders = ReloadOrders()
        self.bytes_moved = 0
        self._storages: weakref.WeakValueDictionary[int, LiveStorage] = weakref.WeakValueDictionary()
        # Weak: a graph that is dropped takes its storages along, copies under way included.
        self._leaving: deque[tuple[weakref.ref[OffloadedStorage], int]] = deque()
        self._leaving_bytes = 0

    def find(self, key: int, version: int) -> LiveStorage | None:
        """What is there already for the storage of this key, if it has the bytes of that version."""
        found = self._storages.get(key)
        return found if found is not None and found.holds(version) else None

    def register(self, tensor: Tensor, storage: LiveStorage) -> None:
        """Have `find` find it."""
        self._storages[tensor.untyped_storage()._cdata] = storage

    def keep(self, tensor: Tensor, guard: VersionGuard, forward: ForwardPass, index: int) -> KeptStorage:
        """Leave a storage where it is."""
        storage = KeptStorage(tensor, guard, forward, index)
        self.register(tensor, storage)
        return storage

    def offload(self, tensor: Tensor, guard: VersionGuard, forward: ForwardPass, index: int) -> LiveStorage:
        """Start copying a storage to the host, or keep it where the host has no room."""
        block = self.arena.acquire(tensor.untyped_storage().nbytes())
        if block is None:
            return self.keep(tensor, guard, forward, index)
        storage = OffloadedStorage(tensor, guard, forward, index, block)
        self.bytes_moved += storage.num_bytes
        self.register(tensor, storage)
        forward.add(storage)
        return storage

    def leave(self, storage: OffloadedStorage, in_flight_bytes: int) -> None:
        """Queue a storage whose copy to the host has begun; the oldest give up their memory where too many wait.

        In this order and at this moment only, however far the device has come: then each step allocates and frees in
        the same order as the last one.
        """
        self._leaving.append((weakref.ref(storage), storage.num_bytes))
        self._leaving_bytes += storage.num_bytes
        while self._leaving_bytes > in_flight_bytes:
            oldest, num_bytes = self._leaving.popleft()
            self._leaving_bytes -= num_bytes
            alive = oldest()
            if alive is not None:
                alive.let_go()

    def begin_pass(self) -> None:
        """Forget the copies of graphs that are gone, and count the peak anew."""
        self._leaving = deque(entry for entry in self._leaving if entry[0]() is not None)
        self._leaving_bytes = sum(num_bytes for _, num_bytes in self._leaving)
        self.residency.settle()
        self.residency.peak_bytes = self.residency.now_bytes
