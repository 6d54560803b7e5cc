"""A model of CUDA's caching allocator: the memory that it reserves for a log of allocations.

Source: c10/cuda/CUDACachingAllocator.cpp with its default settings. Blocks are multiples of 512 bytes; up to 1 MiB they
come from 2 MiB segments; up to 10 MiB from 20 MiB segments; larger ones get a segment of their own, a multiple of 2
MiB. A segment serves the stream that asked for it. The best fitting free block is taken, and split if enough is left;
neighbours that are free join again. Only when the device is full are segments without tensors returned.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from hf_memopt.units import MIB

BLOCK_BYTES = 512
_SMALL_BYTES, _SMALL_SEGMENT_BYTES = MIB, 2 * MIB
_MEDIUM_BYTES, _MEDIUM_SEGMENT_BYTES = 10 * MIB, 20 * MIB
_LARGE_MULTIPLE_BYTES = 2 * MIB


# Whether blocks are small, and their stream.
Pool = tuple[bool, int]


class OutOfDeviceMemoryError(MemoryError):
    """The modelled device has no room."""


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A piece of a segment; its neighbours there may be free or not."""

    address: int
    num_bytes: int
    pool: Pool
    free: bool = True
    previous: "MemoryBlock | None" = None
    following: "MemoryBlock | None" = None


class CachingAllocator:
    """Reserves segments for blocks; addresses fall from 0."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        # By size, then address, in which no two agree.
        self._free: defaultdict[Pool, list[Any]] = defaultdict(list)
        self.lowest_address = 0

    def allocate(self, num_bytes: int, stream: int = 0) -> MemoryBlock:
        num_bytes = max(BLOCK_BYTES, -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES)
        small = num_bytes <= _SMALL_BYTES
        pool = small, stream
        free = self._free[pool]
        # The best fit, and of equally large blocks the one at the lowest address, as in torch.
        position = bisect_left(free, (num_bytes,))
        block = free.pop(position)[2] if position < len(free) else self._new_segment(num_bytes, pool)
        block.free = False
        # As in torch: a small block is split at any size, a large one only if the rest is no small block.
        rest = block.num_bytes - num_bytes
        if rest >= BLOCK_BYTES if small else rest > _SMALL_BYTES:
            self._split(block, num_bytes)
        self.allocated_bytes += block.num_bytes
        return block

    def release(self, block: MemoryBlock) -> None:
        block.free = True
        self.allocated_bytes -= block.num_bytes
        # Free blocks never lie side by side, so one look to either side suffices.
        for neighbour in (block.previous, block.following):
            if neighbour is not None and neighbour.free:
                free = self._free[neighbour.pool]
                del free[bisect_left(free, (neighbour.num_bytes, neighbour.address))]
                block = self._joined(block, neighbour)
        self._insert(block)

    def _new_segment(self, num_bytes: int, pool: Pool) -> MemoryBlock:
        segment_bytes = _segment_bytes(num_bytes)
        if not self._has_room(segment_bytes):
            self._return_unused()
            if not self._has_room(segment_bytes):
                raise OutOfDeviceMemoryError(
                    f"no room for {num_bytes} bytes: {self.reserved_bytes} of {self.capacity_bytes} are reserved"
                )
        self.reserved_bytes += segment_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        # Published runs show falling addresses: with rising ones up to 9 % of a T4's reserved bytes are missing where
        # attention's scores have many blocks of one size, with falling ones none.
        self.lowest_address -= segment_bytes
        return MemoryBlock(self.lowest_address, segment_bytes, pool)

    def _has_room(self, num_bytes: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + num_bytes <= self.capacity_bytes

    def _return_unused(self) -> None:
        for pool, free in self._free.items():
            # Only whole segments, which are blocks without neighbours, can go back to the device.
            kept = [entry for entry in free if entry[2].previous or entry[2].following]
            self.reserved_bytes -= sum(entry[0] for entry in free) - sum(entry[0] for entry in kept)
            self._free[pool] = kept

    def _split(self, block: MemoryBlock, num_bytes: int) -> None:
        rest = MemoryBlock(block.address + num_bytes, block.num_bytes - num_bytes, block.pool)
        rest.previous, rest.following = block, block.following
        if block.following is not None:
            block.following.previous = rest
        block.following, block.num_bytes = rest, num_bytes
        self._insert(rest)

    def _joined(self, block: MemoryBlock, neighbour: MemoryBlock) -> MemoryBlock:
        first, second = (neighbour, block) if neighbour is block.previous else (block, neighbour)
        first.num_bytes += second.num_bytes
        first.following = second.following
        if second.following is not None:
            second.following.previous = first
        return first

    def _insert(self, block: MemoryBlock) -> None:
        insort(self._free[block.pool], (block.num_bytes, block.address, block))


def _segment_bytes(num_bytes: int) -> int:
    if num_bytes <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if num_bytes < _MEDIUM_BYTES:
        return _MEDIUM_SEGMENT_BYTES
    return -(-num_bytes // _LARGE_MULTIPLE_BYTES) * _LARGE_MULTIPLE_BYTES


class Replay(NamedTuple):
    """The allocated bytes in blocks after each change, unused ends included, and the most reserved."""

    allocated: list[int]
    peak_reserved_bytes: int


@dataclass(frozen=True)
class MemoryTrace:
    """Device memory over time."""

    storages: tuple[int, ...]  # which storage each change belongs to, by number
    changes: tuple[int, ...]  # bytes, in order; positive when a storage is born, negative when it dies
    phases: tuple[str, ...]
    positions: tuple[int, ...]  # of each change in the history, which counts host memory too
    first_step: int  # index of the change at which the first step begins
    in_blocks: bool = True  # whether memory comes in the blocks of CUDA's allocator, or byte by byte
    streams: Mapping[int, int] = field(default_factory=dict)  # of storages by number, where it is not the first one

    @cached_property
    def unlimited(self) -> Replay:
        return self.replay()

    def held(self) -> list[int]:
        """Return the bytes allocated after each change; in blocks, on a device that is never full."""
        return self.unlimited.allocated if self.in_blocks else list(accumulate(self.changes))

    def peak(self) -> tuple[int, int]:
        """Return the most that is held from the first step on, and the index of the change to it."""
        held = self.held()
        position = max(range(min(self.first_step, len(held) - 1), len(held)), key=held.__getitem__)
        return held[position], position

    def peaks_by_phase(self) -> dict[str, int]:
        peaks: dict[str, int] = {}
        for held, phase in list(zip(self.held(), self.phases, strict=True))[self.first_step :]:
            peaks[phase] = max(peaks.get(phase, 0), held)
        return peaks

    def replay(self, capacity_bytes: int | None = None) -> Replay:
        allocator = CachingAllocator(capacity_bytes)
        allocated = [allocator.allocated_bytes for _ in self.placed_by(allocator)]
        return Replay(allocated, allocator.peak_reserved_bytes)

    def placed_by(self, allocator: CachingAllocator) -> Iterator[tuple[int, MemoryBlock | None]]:
        """Follow the run with an allocator; yield each changed storage's size and block, 0 and None after its death."""
        blocks: dict[int, MemoryBlock] = {}
        sizes: dict[int, int] = {}
        for storage, change in zip(self.storages, self.changes, strict=True):
            sizes[storage] = sizes.get(storage, 0) + change
            # torch holds both blocks of a resized storage during the copy between them, which is left out here.
            if storage in blocks:
                allocator.release(blocks.pop(storage))
            if sizes[storage]:
                blocks[storage] = allocator.allocate(sizes[storage], self.streams.get(storage, 0))
            yield sizes[storage], blocks.get(storage)

    def fits(self, capacity_bytes: int) -> bool:
        try:
            self.replay(capacity_bytes)
        except OutOfDeviceMemoryError:
            return False
        return True

    @cached_property
    def smallest_capacity(self) -> int:
        """The least memory of a device on which the allocator gets through, to 2 MiB."""
        failing, fitting = max(accumulate(self.changes)) - 1, self.unlimited.peak_reserved_bytes
        while fitting - failing > _LARGE_MULTIPLE_BYTES:
            middle = (failing + fitting) // 2
            failing, fitting = (failing, middle) if self.fits(middle) else (middle, fitting)
        return fitting
