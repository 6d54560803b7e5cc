"""The file of a disk tier, as the memory below the device sees it, and its extents: handed out, and joined again."""

import bisect
import mmap
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from hf_memopt.transfer.copier import Transfer

# Space held beyond this many times the need is given back.
_SLACK = 1.5


class Extent(NamedTuple):
    """Whole pages of a file, with room for `nbytes` bytes wherever in the first page they begin."""

    start: int
    num_bytes: int
    nbytes: int


class DiskSpace:
    """Hands out extents of a file that grows as needed, the smallest free one that is large enough first.

    Args:
        page_bytes: extents begin and end at multiples of it.
        resize: gives the file so many bytes; an OSError where the disk has no room for them.
    """

    def __init__(self, page_bytes: int, resize: Callable[[int], None], budget_bytes: int | None = None) -> None:
        self._page_bytes, self._resize = page_bytes, resize
        self.budget_bytes = budget_bytes
        # Free extents as (start, end), in order, none next to another.
        self._free: list[tuple[int, int]] = []
        # Extents given back, by destructors at any moment.
        self._returned: deque[Extent] = deque()
        self._peak_bytes = 0
        self.num_allocations = 0
        self.bytes_held = 0
        self._live_bytes = 0

    @property
    def bytes_live(self) -> int:
        return self._live_bytes - sum(extent.num_bytes for extent in tuple(self._returned))

    def acquire(self, num_bytes: int) -> Extent | None:
        """Return an extent for so many bytes, or None if the budget has no room for it."""
        self._take_back()
        size = -(-(num_bytes + self._page_bytes - 1) // self._page_bytes) * self._page_bytes
        fitting = [(end - start, start) for start, end in self._free if end - start >= size]
        start = min(fitting)[1] if fitting else self._grow(size)
        if start is None:
            return None
        place = bisect.bisect_left(self._free, (start, 0))
        end = self._free[place][1]
        self._free[place : place + 1] = [(start + size, end)] if start + size < end else []
        self._live_bytes += size
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        return Extent(start, size, num_bytes)

    def release(self, extent: Extent) -> None:
        """Take back an extent. Destructors call this at any moment, in methods of this object or another thread too."""
        self._returned.append(extent)

    def trim(self) -> None:
        """Give back the free end of the file beyond 1.5 times the largest need since the last call."""
        self._take_back()
        wanted = max(round(_SLACK * self._peak_bytes), self._end_of_use())
        wanted = -(-wanted // self._page_bytes) * self._page_bytes
        if wanted < self.bytes_held:
            self._set_length(wanted)
        self._peak_bytes = self._live_bytes

    def _take_back(self) -> None:
        while self._returned:
            extent = self._returned.popleft()
            self._live_bytes -= extent.num_bytes
            self._add_free(extent.start, extent.start + extent.num_bytes)

    def _add_free(self, start: int, end: int) -> None:
        place = bisect.bisect_left(self._free, (start, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == start:
            start = self._free.pop(place - 1)[0]
            place -= 1
        self._free.insert(place, (start, end))

    def _grow(self, size: int) -> int | None:
        """Lengthen the file until its free end is large enough; returns where that begins."""
        start = self._end_of_use()
        if self.budget_bytes is not None and start + size > self.budget_bytes:
            return None
        self._set_length(start + size)
        self.num_allocations += 1
        return start

    def _end_of_use(self) -> int:
        ends_free = bool(self._free) and self._free[-1][1] == self.bytes_held
        return self._free[-1][0] if ends_free else self.bytes_held

    def _set_length(self, num_bytes: int) -> None:
        start = self._end_of_use()
        self._resize(num_bytes)
        if start < self.bytes_held:
            self._free.pop()
        self.bytes_held = num_bytes
        if start < num_bytes:
            self._free.append((start, num_bytes))


class FileCopy(Transfer, Protocol):
    """A copy between host memory and a file."""

    def is_over(self) -> bool: ...


class TierFile(Protocol):
    """A file that holds the bytes of a disk tier: `ScratchFile`, or one that a simulation makes up.

    Attributes:
        space: hands out the extents of the file.
        waited_s: seconds for which callers have waited for reads and writes.
        write_bytes_per_s: bandwidth, as `read_bytes_per_s`.
    """

    space: DiskSpace
    bytes_written: int
    waited_s: float
    write_bytes_per_s: float
    read_bytes_per_s: float

    def write(self, source: Tensor, extent: Extent) -> FileCopy:
        """Start writing host memory."""

    def read(self, extent: Extent, destination: Tensor) -> FileCopy:
        """Start reading to host memory."""

    def mapped(self, extent: Extent) -> mmap.mmap:
        """Map an extent, to read and write; the system reads its bytes on access."""

    def settle(self) -> None:
        """Wait for all reads and writes, those that an interrupt has cut off from their callers too."""

    def wear(self) -> str:
        """Return the bytes written, and in a day at this rate."""
