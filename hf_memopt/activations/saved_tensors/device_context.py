"""Copies from one device: its host memory, what is stored there, and what is on its way."""

import weakref
from collections import deque

import torch
from torch import Tensor

from hf_memopt.activations.saved_tensors.device_bytes import Residency
from hf_memopt.activations.saved_tensors.forward_pass import ForwardPass, ReloadOrders
from hf_memopt.activations.saved_tensors.storages import KeptStorage, LiveStorage, OffloadedStorage, TracedStorage
from hf_memopt.transfer import Copier
from hf_memopt.transfer.clock import Clock
from hf_memopt.transfer.host_arena import HostArena

# What so many passes have not needed is given back.
_TRIM_EVERY = 1000


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
        self._num_passes = 0
        # By key. Each storage takes itself out when it dies.
        self._storages: dict[int, weakref.ref[LiveStorage]] = {}
        # Weak: a graph that is dropped takes its storages along, copies under way included.
        self._leaving: deque[weakref.ref[OffloadedStorage]] = deque()
        self._leaving_bytes = 0

    def get(self, key: int) -> LiveStorage | None:
        """What was saved last of the storage of this key, whatever has become of its bytes."""
        entry = self._storages.get(key)
        return None if entry is None else entry()

    def find(self, tensor: Tensor, key: int) -> LiveStorage | None:
        """What is there already for a tensor's storage, if it has the tensor's bytes."""
        entry = self._storages.get(key)
        if entry is None:
            return None
        found = entry()
        return found if found is not None and found.covers(tensor) else None

    def register(self, storage: LiveStorage) -> None:
        """Have `find` find it."""
        self._storages[storage.key] = weakref.ref(storage)

    def forget(self, key: int) -> None:
        """A storage dies; another one of its key may have been registered since."""
        entry = self._storages.get(key)
        if entry is not None and entry() is None:
            del self._storages[key]

    def keep(self, tensor: Tensor, forward: ForwardPass, index: int) -> KeptStorage:
        """Leave a storage where it is."""
        storage = KeptStorage(tensor, forward, index)
        self.register(storage)
        return storage

    def offload(self, tensor: Tensor, forward: ForwardPass, index: int) -> LiveStorage:
        """Start copying a storage to the host, or keep it where the host has no room."""
        block = self.arena.acquire(tensor.untyped_storage().nbytes())
        if block is None:
            return self.keep(tensor, forward, index)
        kind = TracedStorage if forward.is_traced else OffloadedStorage
        storage = kind(tensor, forward, index, block)
        self.bytes_moved += storage.num_bytes
        self.register(storage)
        forward.add(storage)
        return storage

    def leave(self, storage: OffloadedStorage, in_flight_bytes: int) -> None:
        """Queue a storage whose copy to the host has begun; the oldest give up their memory where too many wait.

        In this order and at this moment only, however far the device has come: then each step allocates and frees in
        the same order as the last one.
        """
        storage.is_leaving = True
        self._leaving.append(weakref.ref(storage))
        self._leaving_bytes += storage.num_bytes
        while self._leaving_bytes > in_flight_bytes:
            oldest = self._leaving.popleft()()
            if oldest is not None and oldest.is_leaving:
                oldest.let_go()

    def stay(self, storage: OffloadedStorage) -> None:
        """Take a storage out of those that wait to give up their memory: it has, or backward has claimed it."""
        if storage.is_leaving:
            storage.is_leaving = False
            self._leaving_bytes -= storage.num_bytes

    def empty_device(self, num_bytes: int) -> Tensor:
        """Device memory for what comes back. Where there is none, what waits to give up its memory does so first."""
        try:
            return self.copier.empty_device(num_bytes)
        except torch.OutOfMemoryError:
            if not self.let_all_go():
                raise
        return self.copier.empty_device(num_bytes)

    def let_all_go(self) -> bool:
        """Wait for all copies to the host and give up the memory; whether there was any."""
        leaving = [storage for storage in (entry() for entry in self._leaving) if storage and storage.is_leaving]
        for storage in leaving:
            storage.let_go()
        return bool(leaving)

    def begin_pass(self) -> None:
        """Forget the copies that are over, and count the peak anew."""
        self._num_passes += 1
        if self._num_passes % _TRIM_EVERY == 0:
            self.arena.trim()
        self.arena.log_growth()
        self._leaving = deque(entry for entry in self._leaving if (storage := entry()) and storage.is_leaving)
        self.residency.settle()
        self.residency.peak_bytes = self.residency.now_bytes
