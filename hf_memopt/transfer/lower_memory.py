"""The memories below the device in one form: blocks of them, and copies to and from the device."""

import ctypes
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_memopt.transfer.clock import Clock, measure_link
from hf_memopt.transfer.copier import Copier, Transfer
from hf_memopt.transfer.disk_space import DiskSpace
from hf_memopt.transfer.host_arena import HostArena
from hf_memopt.transfer.tier import Tier, TierName


class LowerMemory(ABC):
    """Memory below the device, whose blocks `space` hands out. Copies obey the rules of `Copier`.

    Attributes:
        bytes_live: of the blocks in use.
        bytes_held: taken from the system, for now and for later.
        host_bytes_held: of the host's memory, also that which bytes pass through.
        num_allocations: how often bytes were taken from the system.
        failures: errors of copies without a reader, and the numbers of their passes; `DeviceState.raise_failure` takes
            them out.
    """

    name: TierName

    def __init__(self, space: HostArena | DiskSpace) -> None:
        self._space = space
        self.failures: list[tuple[Exception, int]] = []

    @property
    def bytes_live(self) -> int:
        return self._space.bytes_live

    @property
    def bytes_held(self) -> int:
        return self._space.bytes_held

    @property
    def host_bytes_held(self) -> int:
        return 0

    @property
    def num_allocations(self) -> int:
        return self._space.num_allocations

    def trim(self) -> None:
        """Give back memory that recent passes have not needed."""
        self._space.trim()

    @abstractmethod
    def acquire(self, num_bytes: int, storage: torch.UntypedStorage) -> Any:
        """Return a block, with `nbytes`, for a part of a storage, or None where there is no room for it."""

    @abstractmethod
    def release(self, block: Any) -> None:
        """Take back a block once its copies are over. Destructors call this at any moment."""

    @abstractmethod
    def write(self, source: Tensor, block: Any) -> Transfer:
        """Start copying `(num_bytes,)` uint8 from the device."""

    @abstractmethod
    def read(self, block: Any, destination: Tensor) -> Transfer:
        """Start copying `(num_bytes,)` uint8 to the device."""

    @abstractmethod
    def settle(self) -> None:
        """Wait on the host for all copies, those that an interrupt has cut off from their callers too."""

    @abstractmethod
    def at_home(self, block: Any) -> Any:
        """Return the bytes of `block`, written before, as a buffer that weak references may name, without a copy.

        Later writes of the block change them. Waits for writes under way.
        """

    @abstractmethod
    def empty_device(self, num_bytes: int, block: Any, first: int) -> Tensor:
        """Uninitialised device memory, `(num_bytes,)` uint8; the bytes of `block` can be read from byte `first` on."""

    @abstractmethod
    def begin_pass(self) -> None:
        """Note that a pass begins."""

    @abstractmethod
    def stall_ms(self) -> float:
        """Milliseconds for which compute waited for copies."""

    @abstractmethod
    def tier(self, clock: Clock) -> Tier:
        """Return the figures that plans need, measured once."""


class Place(NamedTuple):
    """A block, and the memory that it is of."""

    memory: LowerMemory
    block: Any

    @property
    def nbytes(self) -> int:
        return int(self.block.nbytes)

    def release(self) -> None:
        self.memory.release(self.block)


class LowerHost(LowerMemory):
    """Host memory, as a copier reaches it."""

    name = "host"

    def __init__(self, copier: Copier, budget_bytes: int | None) -> None:
        self._copier, self._budget_bytes = copier, budget_bytes
        self._arena = HostArena(copier, budget_bytes)
        super().__init__(self._arena)
        self._tier: Tier | None = None

    @property
    def host_bytes_held(self) -> int:
        return self._arena.bytes_held

    def acquire(self, num_bytes: int, storage: torch.UntypedStorage) -> Tensor | None:
        return self._arena.acquire(num_bytes)

    def release(self, block: Tensor) -> None:
        self._arena.release(block)

    def write(self, source: Tensor, block: Tensor) -> Transfer:
        return self._copier.to_host(source, block)

    def read(self, block: Tensor, destination: Tensor) -> Transfer:
        return self._copier.to_device(block, destination)

    def settle(self) -> None:
        self._copier.settle()

    def at_home(self, block: Tensor) -> Any:
        self.settle()
        shown: Any = (ctypes.c_uint8 * block.nbytes).from_address(block.data_ptr())
        shown.memory = block  # keeps it
        return shown

    def empty_device(self, num_bytes: int, block: Tensor, first: int) -> Tensor:
        return self._copier.empty_device(num_bytes)

    def begin_pass(self) -> None:
        self._arena.log_growth()

    def stall_ms(self) -> float:
        return self._copier.stall_ms()

    def tier(self, clock: Clock) -> Tier:
        if self._tier is None:
            self._tier = Tier("host", *measure_link(self._copier, clock), self._budget_bytes)
        return self._tier
