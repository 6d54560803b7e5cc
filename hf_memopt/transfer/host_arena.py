"""Host memory for offloaded tensors: a few large regions, from which blocks are cut step after step."""

import logging
import time
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import ClassVar, NamedTuple

from torch import Tensor

from hf_memopt.transfer.copier import Copier
from hf_memopt.units import format_bytes, format_ms

logger = logging.getLogger(__name__)

# Enough for every dtype and every copy.
_ALIGNMENT = 64
# Times the largest need, taken once sizes have turned out to change.
_HEADROOM = 1.125
# Memory held beyond this many times the need is given back.
_SLACK = 1.5


class HostHoldings(NamedTuple):
    """Memory that the arenas of this process hold, and how often one has taken some."""

    num_bytes: int
    num_allocations: int


class Region(NamedTuple):
    """Name of host memory taken at once: a storage, or a part of one from `base` on."""

    storage: int
    base: int


class FreeExtent(NamedTuple):
    """Free bytes of a region, from `start` in its storage on."""

    region: Region
    start: int
    num_bytes: int


class HostArena:
    """Hands out host blocks and takes them back. A training step that repeats finds every block it needs.

    Memory is taken in regions, at first one for each block. A step of other sizes cuts each block out of the smallest
    free extent that is large enough; where none is, the wholly free regions become one. So the memory held stays near
    the largest need, and nothing more is taken once needs have ceased to grow.

    Args:
        budget_bytes: limit of the memory held; None, no limit.
        alignment: blocks begin at multiples of it, counted from the beginning of a region.
        empty_host: allocates a region; None, `copier.empty_host` does.
    """

    _of_process: ClassVar[weakref.WeakSet["HostArena"]] = weakref.WeakSet()
    _num_of_process: ClassVar[int] = 0

    def __init__(
        self,
        copier: Copier,
        budget_bytes: int | None = None,
        alignment: int = _ALIGNMENT,
        empty_host: Callable[[int], Tensor] | None = None,
    ) -> None:
        self._copier, self._alignment = copier, alignment
        self._empty_host = copier.empty_host if empty_host is None else empty_host
        self._budget_bytes = budget_bytes
        self._regions: dict[Region, Tensor] = {}
        # Free blocks by size; they become extents when another size is asked for.
        self._blocks: dict[int, list[Tensor]] = {}
        self._extents: list[FreeExtent] = []
        # The most in use at a time: between the last two calls of `trim`, and since.
        self._peak_bytes = self._recent_peak_bytes = 0
        # Whether a step has needed more than the one before it since the last `trim`: one region serves best then.
        self._sizes_change = False
        # Regions that nothing has been cut from since the last `trim`.
        self._untouched: set[Region] = set()
        self._new_bytes = 0
        self._new_s = 0.0
        self.num_allocations = 0
        self.bytes_held = 0
        self.bytes_live = 0
        self._of_process.add(self)

    @classmethod
    def of_process(cls) -> HostHoldings:
        """Return the bytes of all live arenas; the allocations are of those gone too."""
        return HostHoldings(sum(arena.bytes_held for arena in cls._of_process), cls._num_of_process)

    def acquire(self, num_bytes: int) -> Tensor | None:
        """Return a block, `(num_bytes,)` uint8, or None if the budget has no room for it."""
        blocks = self._blocks.get(num_bytes)
        block = blocks.pop() if blocks else self._cut(num_bytes)
        if block is not None:
            self.bytes_live += num_bytes
            self._recent_peak_bytes = max(self._recent_peak_bytes, self.bytes_live)
        return block

    def release(self, block: Tensor) -> None:
        """Take back a block. Destructors call this at any moment, in the arena's methods or the backward thread too."""
        self._copier.release(block)
        num_bytes = block.nbytes
        self.bytes_live -= num_bytes
        self._blocks.setdefault(num_bytes, []).append(block)

    def log_growth(self) -> None:
        if self._new_bytes:
            logger.info(
                "activation offloading: took %s of host memory in %s, holds %s in %d allocations; later passes use it "
                "again",
                format_bytes(self._new_bytes),
                format_ms(1e3 * self._new_s),
                format_bytes(self.bytes_held),
                len(self._regions),
            )
            self._new_bytes, self._new_s = 0, 0.0

    def trim(self) -> None:
        """Give back memory beyond 1.5 times the largest need since the last call: unused regions first, then free."""
        before = self.bytes_held
        self._join()
        self._peak_bytes = self._recent_peak_bytes
        for wanted in (self._untouched, set(self._regions)):
            if self.bytes_held > _SLACK * self._recent_peak_bytes:
                self._drop([extent for extent in self._free_regions() if extent.region in wanted])
        self._untouched = {extent.region for extent in self._free_regions()}
        self._recent_peak_bytes = self.bytes_live
        self._sizes_change = False
        if self.bytes_held < before:
            logger.info(
                "activation offloading: gave %s of host memory back, which is not needed any more",
                format_bytes(before - self.bytes_held),
            )

    def _cut(self, num_bytes: int) -> Tensor | None:
        self._join()
        size = self._aligned(num_bytes)
        fitting = [each for each in self._extents if each.num_bytes >= size]
        extent = min(fitting, key=attrgetter("num_bytes"), default=None)
        is_scattered = self._sizes_change and len(self._regions) > 1
        if extent is None or (is_scattered and self.bytes_live == 0):
            extent = self._grow(size)
        if extent is None:
            return None
        self._extents.remove(extent)
        if extent.num_bytes > size:
            self._extents.append(FreeExtent(extent.region, extent.start + size, extent.num_bytes - size))
        self._untouched.discard(extent.region)
        start = extent.start - extent.region.base
        return self._regions[extent.region][start : start + num_bytes]

    def _join(self) -> None:
        blocks, self._blocks = self._blocks, {}
        if not blocks:
            return
        self._extents += [self._extent(block) for each in blocks.values() for block in each]
        joined: list[FreeExtent] = []
        for extent in sorted(self._extents):
            region, start, num_bytes = joined[-1] if joined else (None, 0, 0)
            if region is not None and (region, start + num_bytes) == (extent.region, extent.start):
                joined[-1] = FreeExtent(region, start, num_bytes + extent.num_bytes)
            else:
                joined.append(extent)
        self._extents = joined

    def _grow(self, size: int) -> FreeExtent | None:
        """Take a new region in place of the wholly free ones, which are too small."""
        free = self._free_regions()
        free_bytes = sum(extent.num_bytes for extent in free)
        rest_bytes = self.bytes_held - free_bytes
        wanted = size
        self._sizes_change = self._sizes_change or bool(free)
        if self._sizes_change:
            peak_bytes = max(self._peak_bytes, self._recent_peak_bytes, self.bytes_live + size)
            wanted = max(size, free_bytes, self._aligned(round(_HEADROOM * peak_bytes) - rest_bytes))
        if self._budget_bytes is not None:
            wanted = min(wanted, (self._budget_bytes - rest_bytes) // self._alignment * self._alignment)
        if wanted < size:
            return None
        self._drop(free)
        begun = time.perf_counter()
        region = self._empty_host(wanted)
        self._new_s += time.perf_counter() - begun
        self._new_bytes += wanted
        self.num_allocations += 1
        HostArena._num_of_process += 1
        self.bytes_held += wanted
        name = Region(region.untyped_storage()._cdata, int(region.storage_offset()))
        self._regions[name] = region
        extent = FreeExtent(name, name.base, wanted)
        self._extents.append(extent)
        return extent

    def _extent(self, block: Tensor) -> FreeExtent:
        # Regions may lie side by side in one storage of the copier's.
        storage, start = block.untyped_storage()._cdata, int(block.storage_offset())
        base = max(region.base for region in self._regions if region.storage == storage and region.base <= start)
        return FreeExtent(Region(storage, base), start, self._aligned(block.nbytes))

    def _aligned(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment

    def _free_regions(self) -> list[FreeExtent]:
        return [extent for extent in self._extents if extent.num_bytes == self._regions[extent.region].nbytes]

    def _drop(self, regions: list[FreeExtent]) -> None:
        for extent in regions:
            self._extents.remove(extent)
            del self._regions[extent.region]
            self.bytes_held -= extent.num_bytes
