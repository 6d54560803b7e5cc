"""Memories on a disk: the host memory that bytes pass through."""

from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_memopt.transfer import SyncCopier
from hf_memopt.transfer.disk_memory import StagedDisk
from hf_memopt.transfer.memories_below import memories_below
from hf_memopt.transfer.scratch_file import ScratchFile
from hf_memopt.units import MIB


class WatchedCopier(SyncCopier):
    """Knows the host memory that it gave out, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[StorageWeakRef] = []

    def empty_host(self, num_bytes: int) -> torch.Tensor:
        memory = super().empty_host(num_bytes)
        self.given.append(StorageWeakRef(memory.untyped_storage()))
        return memory


def test_copies_that_are_over_keep_no_host_memory(tmp_path: Path) -> None:
    copier = WatchedCopier()
    disk = StagedDisk(ScratchFile(tmp_path), copier, 4 * MIB)
    source = torch.arange(MIB, dtype=torch.int64).view(torch.uint8)[:MIB]
    block = disk.acquire(MIB, source.untyped_storage())
    assert block is not None
    disk.write(source, block).wait()
    read = disk.read(block, destination := torch.empty_like(source))
    read.wait()
    assert torch.equal(destination, source)
    disk.begin_pass()
    assert disk.staging.bytes_live == 0
    for _ in range(2):
        disk.staging.trim()
    assert disk.staging.bytes_held == 0
    assert copier.given
    # The block lives, and so does the second copy.
    assert all(memory.expired() for memory in copier.given)


def test_host_memory_whose_copies_were_cut_off_is_replaced(tmp_path: Path) -> None:
    disk = StagedDisk(ScratchFile(tmp_path), SyncCopier(), 4 * MIB)
    for _ in range(5):
        disk._take(MIB)  # an interrupt comes right after it
    source = torch.arange(MIB, dtype=torch.int64).view(torch.uint8)[:MIB]
    block = disk.acquire(MIB, source.untyped_storage())
    assert block is not None
    disk.write(source, block).wait()
    disk.read(block, destination := torch.empty_like(source)).wait()
    assert torch.equal(destination, source)


def test_waits_for_one_copier_are_counted_once(tmp_path: Path) -> None:
    copier, file = SyncCopier(), ScratchFile(tmp_path)
    memories, _ = memories_below(torch.device("cpu"), copier, True, 64 * MIB, file)
    assert [memory.name for memory in memories] == ["host", "disk"]
    for memory in memories:
        source = torch.ones(MIB, dtype=torch.uint8)
        block = memory.acquire(MIB, source.untyped_storage())
        memory.write(source, block).wait()
        memory.read(block, torch.empty_like(source)).wait()
    assert copier.stall_ms() > 0
    assert file.waited_s > 0
    assert sum(memory.stall_ms() for memory in memories) == copier.stall_ms() + 1e3 * file.waited_s
