"""Memory of this process that is mapped from files, as Linux lists it."""

import bisect
import os
import re
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) +(/.*)$")


class MappedRange(NamedTuple):
    """Addresses [begin, end) that show the bytes of a file from `position` on.

    Attributes:
        identity: of the file: the numbers of its device and inode.
        is_written: whether some bytes differ from the file's, or may.
    """

    begin: int
    end: int
    position: int
    identity: tuple[int, int]
    path: Path
    is_written: bool


class MappedMemory:
    """The mapped memory of this process now; nothing elsewhere than on Linux."""

    def __init__(self) -> None:
        listing = Path("/proc/self/smaps")
        lines = os.fsdecode(listing.read_bytes()).split("\n") if listing.exists() else []
        self._ranges: list[MappedRange] = []
        is_file = False
        for line in lines:
            name, _, value = line.partition(":")
            if (head := _HEAD.match(line)) is not None:
                begin, end, position, major, minor = (int(head[number], 16) for number in range(1, 6))
                identity = os.makedev(major, minor), int(head[6])
                self._ranges.append(MappedRange(begin, end, position, identity, Path(head[7]), False))
                is_file = True
            elif "-" in name:
                is_file = False
            # Pages that were written are this process's own.
            elif is_file and name in ("Anonymous", "Swap") and value.split()[0] != "0":
                self._ranges[-1] = self._ranges[-1]._replace(is_written=True)

    def range_of(self, memory: Tensor) -> MappedRange | None:
        """Return the range that memory of the host lies in; None for other memory."""
        if memory.device.type != "cpu":
            return None
        place = bisect.bisect_right(self._ranges, memory.data_ptr(), key=lambda each: each.begin) - 1
        found = self._ranges[place] if place >= 0 else None
        return found if found is not None and memory.data_ptr() + memory.nbytes <= found.end else None

    def shows(self, memory: Tensor, identity: tuple[int, int], position: int) -> bool:
        """Return whether memory shows a file's bytes from `position` on, and has never been written."""
        found = self.range_of(memory)
        return (
            found is not None
            and not found.is_written
            and found.identity == identity
            and memory.data_ptr() - found.begin + found.position == position
        )
