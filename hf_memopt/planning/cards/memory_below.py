"""The memories below a card that a simulated run may use: the host's, and a disk."""

from dataclasses import dataclass

from hf_memopt.units import parse_size

# Assumed where no speed is given: of a disk, and of the memory of a desktop computer, as CPU optimizers reach it.
DEFAULT_BYTES_PER_S = 2e9
HOST_BYTES_PER_S = 40e9


@dataclass(frozen=True)
class Disk:
    """A disk, as far as a run may use it."""

    num_bytes: int | None = None  # of its file at most; None, no limit
    bytes_per_s: float = DEFAULT_BYTES_PER_S  # bandwidth in each direction


@dataclass(frozen=True)
class MemoryBelow:
    """The limits of the memories below a card."""

    host_bytes: int | None = None  # host memory that may be used; None, any
    disk: Disk | None = None  # takes the storages that the host has no room for; without it they stay on the card
    host_bytes_per_s: float = HOST_BYTES_PER_S  # bandwidth of the host's memory for updates there

    def holds(self, host_bytes: int, disk_bytes: int = 0) -> bool:
        """Return whether host and disk have so many bytes; without a disk's size it has any."""
        limit = self.disk.num_bytes if self.disk else None
        return (self.host_bytes is None or host_bytes <= self.host_bytes) and (limit is None or disk_bytes <= limit)


def find_memory_below(host: str | None = None, disk: str | None = None, needs_no_host: bool = False) -> MemoryBelow:
    """Return the memories of texts such as "32GiB" and "500GiB", with or without their speeds, as in "500GiB@5GBps".

    A disk for files of weights or of an optimizer's state needs no limit of the host's memory.
    """
    host_bytes, host_bytes_per_s = (None, HOST_BYTES_PER_S) if host is None else _sized("host", host, HOST_BYTES_PER_S)
    if disk is not None and host_bytes is None and not needs_no_host:
        raise ValueError(f"disk={disk!r} is for what the host has no room for; say how much it has, such as host=32GiB")
    files = None if disk is None else Disk(*_sized("disk", disk, DEFAULT_BYTES_PER_S))
    return MemoryBelow(host_bytes, files, host_bytes_per_s)


def _sized(name: str, text: str, default_bytes_per_s: float) -> tuple[int, float]:
    size, at, speed = text.partition("@")
    try:
        return parse_size(size), parse_size(speed) if at else default_bytes_per_s
    except ValueError:
        raise ValueError(
            f"{name}={text!r} is neither a size such as 500GiB nor a size and a speed such as 500GiB@5GBps"
        ) from None
