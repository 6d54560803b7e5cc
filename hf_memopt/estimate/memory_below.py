"""The memories below a card that a simulated run may use: the host's, and a disk."""

from dataclasses import dataclass

from hf_memopt.estimate.gpus import parse_size

# Assumed where no speed is given.
DEFAULT_BYTES_PER_S = 2e9


@dataclass(frozen=True)
class Disk:
    """A disk, as far as a run may use it.

    Attributes:
        num_bytes: of its file at most; None, no limit.
        bytes_per_s: bandwidth in each direction.
    """

    num_bytes: int | None = None
    bytes_per_s: float = DEFAULT_BYTES_PER_S


@dataclass(frozen=True)
class MemoryBelow:
    """The limits of the memories below a card; without a disk, storages that the host has no room for stay on the card.

    Attributes:
        host_bytes: host memory that may be used; None, any.
        disk: takes the storages that the host has no room for; None where there is none.
    """

    host_bytes: int | None = None
    disk: Disk | None = None

    def holds(self, host_bytes: int) -> bool:
        """Return whether the host has so many bytes."""
        return self.host_bytes is None or host_bytes <= self.host_bytes


def find_memory_below(host: str | None = None, disk: str | None = None, reads_only: bool = False) -> MemoryBelow:
    """Return the memories of texts such as "32GiB", and "500GiB@5GBps" or "500GiB" for a disk of the default speed.

    Only a disk whose files are read needs no limit of the host's memory.
    """
    host_bytes = None if host is None else parse_size(host, "host")
    if disk is not None and host_bytes is None and not reads_only:
        raise ValueError(f"disk={disk!r} is for what the host has no room for; say how much it has, such as host=32GiB")
    return MemoryBelow(host_bytes, None if disk is None else _disk_from(disk))


def _disk_from(text: str) -> Disk:
    size, at, speed = text.partition("@")
    try:
        return Disk(parse_size(size), parse_size(speed) if at else DEFAULT_BYTES_PER_S)
    except ValueError:
        raise ValueError(
            f"disk={text!r} is neither a size such as 500GiB nor a size and a speed such as 500GiB@5GBps"
        ) from None
