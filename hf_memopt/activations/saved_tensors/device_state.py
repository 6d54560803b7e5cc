"""State that all passes on one device share. It knows storages by a few attributes, and no forward pass."""

import weakref
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_memopt.activations.saved_tensors.prefetcher import ReloadOrders
from hf_memopt.autograd_state import current_node
from hf_memopt.transfer import Copier, clock_for
from hf_memopt.transfer.backends import backend_of
from hf_memopt.transfer.copier import ALIGNMENT
from hf_memopt.transfer.host_arena import HostArena

# Host memory that this many passes have not needed is given back.
_TRIM_EVERY = 1000


class DeviceBytes:
    """Counts the device memory that saved activations hold, in the order in which the host gives it out and takes it.

    A caching allocator counts in that order too, so the figure does not depend on how far the device has come. A
    storage whose last use has begun stays counted until another autograd node takes its turn, since the node at work
    still reads it. Callers that free memory at another moment decrement `now_bytes` themselves.
    """

    def __init__(self) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0
        self._ending_bytes = 0
        self._node: int | None = None

    def add(self, num_bytes: int) -> None:
        if self._ending_bytes:
            self.settle()
        self.now_bytes += num_bytes
        if self.now_bytes > self.peak_bytes:
            self.peak_bytes = self.now_bytes

    def remove_after_node(self, num_bytes: int) -> None:
        """Take memory out of the count once the autograd node at work, its last reader, is done."""
        self.settle()
        self._node = current_node()
        self._ending_bytes += num_bytes

    def settle(self) -> None:
        """Take out memory that ended with the last node, if another one is at work."""
        if self._ending_bytes and (self._node is None or current_node() != self._node):
            self.now_bytes -= self._ending_bytes
            self._ending_bytes = 0


class Outgoing(Protocol):
    """A storage whose copy to the host has begun, as the queue of such copies sees it."""

    num_bytes: int
    is_leaving: bool

    def let_go(self) -> None:
        """Give up the device memory once the copy is over."""


class DeviceState:
    """Host memory, live storages and copies under way of one device."""

    def __init__(self, device: torch.device, copier: Copier, host_budget_bytes: int | None) -> None:
        self.copier = copier
        self.clock = clock_for(device)
        self.hide_operations = backend_of(device).hide_operations
        self.arena = HostArena(copier, host_budget_bytes)
        self.held = DeviceBytes()
        self.orders = ReloadOrders()
        self.bytes_moved = 0
        # Each live storage puts itself in, by key, and takes itself out when it dies.
        self.storages: dict[int, weakref.ref[Any]] = {}
        self._num_passes = 0
        # A graph that is dropped takes its storages along, copies under way included.
        self._leaving: deque[weakref.ref[Outgoing]] = deque()
        self._leaving_bytes = 0

    def leave(self, storage: Outgoing, in_flight_bytes: int) -> None:
        """Queue a storage whose copy has begun; if too many wait, the oldest give up memory, only now and in order."""
        storage.is_leaving = True
        self._leaving.append(weakref.ref(storage))
        self._leaving_bytes += storage.num_bytes
        while self._leaving_bytes > in_flight_bytes:
            oldest = self._leaving.popleft()()
            if oldest is not None and oldest.is_leaving:
                oldest.let_go()

    def stay(self, storage: Outgoing) -> None:
        if storage.is_leaving:
            storage.is_leaving = False
            self._leaving_bytes -= storage.num_bytes

    def empty_device(self, num_bytes: int) -> Tensor:
        """Return device memory for a reload. Where there is none, storages that wait on the queue give up theirs."""
        try:
            memory = self.copier.empty_device(num_bytes)
        except torch.OutOfMemoryError:
            if not self.let_all_go():
                raise
            memory = self.copier.empty_device(num_bytes)
        if memory.storage_offset() % ALIGNMENT:
            raise ValueError(
                f"{type(self.copier).__name__}.empty_device returned memory that begins at byte "
                f"{memory.storage_offset()} of its storage; it has to begin at a multiple of {ALIGNMENT}"
            )
        return memory

    def let_all_go(self) -> bool:
        """Wait for all copies to the host and give up the memory; returns whether there was any."""
        leaving = [storage for storage in (entry() for entry in self._leaving) if storage and storage.is_leaving]
        for storage in leaving:
            storage.let_go()
        return bool(leaving)

    def begin_pass(self) -> None:
        self._num_passes += 1
        if self._num_passes % _TRIM_EVERY == 0:
            self.arena.trim()
        self.arena.log_growth()
        self._leaving = deque(entry for entry in self._leaving if (storage := entry()) and storage.is_leaving)
        self.held.settle()
        self.held.peak_bytes = self.held.now_bytes
