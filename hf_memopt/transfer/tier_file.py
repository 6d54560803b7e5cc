"""The file of a disk tier, as the memory below the device sees it."""

import mmap
from typing import Protocol

from torch import Tensor

from hf_memopt.transfer.copier import Transfer
from hf_memopt.transfer.disk_space import DiskSpace, Extent


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
