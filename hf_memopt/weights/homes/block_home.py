"""Blocks of host memory or of a file, as homes of what visits the device."""

import os
import tempfile

import torch

from hf_memopt.transfer.backends import backend_of, copier_for
from hf_memopt.transfer.copier import Copier
from hf_memopt.transfer.direct_io import PAGE
from hf_memopt.transfer.disk_memory import DirectDisk, StagedDisk
from hf_memopt.transfer.disk_space import TierFile
from hf_memopt.transfer.lower_memory import LowerHost, LowerMemory, Place
from hf_memopt.transfer.storage_memory import ResizedMemory, SparePages, StorageMemory, WholePages
from hf_memopt.units import MIB, format_bytes

# Host memory that blocks pass through on their way to a file and back: room for three at least up to here.
_STAGING_BYTES = 128 * MIB


class BlockHome:
    """The memory below each device that has parameters, from which blocks are taken.

    Args:
        home: `"host"` or `"file"`.
        contents: what the blocks hold, for error messages.
        disk: folder of the file. None: the system's for temporary files.

    Attributes:
        largest_bytes: of the blocks to come.
        file: holds the blocks; None for host memory, and until the first block is taken.
    """

    def __init__(
        self,
        home: str,
        copier: Copier | None,
        disk: str | os.PathLike[str] | None,
        contents: str = "an optimizer's state",
    ) -> None:
        self._home, self._copier, self._contents = home, copier, contents
        self._folder = tempfile.gettempdir() if disk is None else disk
        self.file: TierFile | None = None
        self.largest_bytes = 0
        self.memories: dict[torch.device, LowerMemory] = {}
        self._spare = SparePages()

    def block(self, device: torch.device, num_bytes: int, message: str) -> tuple[StorageMemory, Place]:
        """Return memory of the device, which is there, and a place of as many bytes at home."""
        lower = self._memory(device, num_bytes)
        memory: StorageMemory
        if isinstance(lower, DirectDisk):
            memory = WholePages(num_bytes, 0, message, self._spare)
        else:
            memory = ResizedMemory(num_bytes, device, message)
        return memory, self._acquired(lower, num_bytes, memory.block.untyped_storage())

    def place(self, device: torch.device, num_bytes: int) -> Place:
        """Return a place for bytes that may lie anywhere on the device."""
        return self._acquired(
            self._memory(device, num_bytes), num_bytes, torch.empty(0, device="cpu").untyped_storage()
        )

    def _acquired(self, lower: LowerMemory, num_bytes: int, storage: torch.UntypedStorage) -> Place:
        block = lower.acquire(num_bytes, storage)
        if block is None:
            raise MemoryError(f"home={self._home!r} has no room for {format_bytes(num_bytes)} of {self._contents}")
        return Place(lower, block)

    def settle(self) -> None:
        """Wait on the host for all copies, those that an interrupt has cut off from their callers too."""
        for memory in self.memories.values():
            memory.settle()

    def trim(self) -> None:
        """Give memory that units have dropped back to the system."""
        self._spare.free()
        for memory in self.memories.values():
            memory.trim()

    def _memory(self, device: torch.device, num_bytes: int) -> LowerMemory:
        found = self.memories.get(device)
        if isinstance(found, StagedDisk) and found.staging_bytes < num_bytes:
            found = None  # units that have gone through the smaller one keep it
        if found is None:
            found = self.memories[device] = self._new_memory(device, num_bytes)
        return found

    def _new_memory(self, device: torch.device, num_bytes: int) -> LowerMemory:
        if self._home == "file" and self.file is None:
            self.file = backend_of(device).open_file(self._folder, None)
        if self.file is not None and device.type == "cpu" and self._copier is None and WholePages.are_available():
            return DirectDisk(self.file)
        copier = copier_for(device, purpose="optimizer") if self._copier is None else self._copier
        if self.file is None:
            return LowerHost(copier, None)
        largest_bytes = max(self.largest_bytes, num_bytes) + PAGE
        return StagedDisk(self.file, copier, max(largest_bytes, min(3 * largest_bytes, _STAGING_BYTES)))
