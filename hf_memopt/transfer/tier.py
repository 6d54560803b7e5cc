"""The memories that bytes of a training step may live in, as planner, estimate and reports see them."""

from dataclasses import dataclass, replace
from typing import Literal

from hf_memopt.ranges import POSITIVE

TierName = Literal["host", "disk"]


@dataclass(frozen=True)
class Tier:
    """A memory below the device: the host's, or a disk.

    Attributes:
        name: `"host"` or `"disk"`.
        write_bytes_per_s: measured bandwidth from the device, while the other direction is busy too.
        read_bytes_per_s: measured bandwidth to the device.
        budget_bytes: bytes that it may hold. None, no limit.
        is_pinned: whether copies from and to it run beside the host's own work because its pages are locked.
        wears: whether writing uses it up, so that the bytes written are worth a line in a report.
    """

    name: TierName
    write_bytes_per_s: float
    read_bytes_per_s: float
    budget_bytes: int | None = None
    is_pinned: bool = False
    wears: bool = False

    def __post_init__(self) -> None:
        POSITIVE.check(f"write_bytes_per_s of the {self.name}", self.write_bytes_per_s)
        POSITIVE.check(f"read_bytes_per_s of the {self.name}", self.read_bytes_per_s)

    def slower(self, ratio: float) -> "Tier":
        writes, reads = ratio * self.write_bytes_per_s, ratio * self.read_bytes_per_s
        return replace(self, write_bytes_per_s=writes, read_bytes_per_s=reads)
