"""Figures of an offloader: bytes kept, moved and computed again, and times."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class OffloadStats:
    """Counters since the offloader was made, and figures of the newest pass that has ended; plain passes are left out.

    Attributes:
        bytes_kept: saved tensors left on the device, by view, without the model's weights.
        bytes_moved: copied from the device, of each storage as far as saved tensors show it.
        bytes_recomputed: left to be computed again, by storage.
        bytes_weights: saved weights, buffers, other leaves that require grad and autocast's copies, by view, not moved.
        bytes_deduplicated: saved views whose storage had been copied already.
        host_bytes_live: host memory that graphs hold now; 0 once none is alive.
        host_bytes_pinned: host memory in use or kept for the next step, on the way to a disk too.
        num_host_allocations: grows in the first steps only.
        disk_bytes_live: of the disk's file, in use by graphs now; 0 once none is alive.
        disk_bytes_held: length of that file.
        disk_bytes_written: to that file so far.
        stall_ms: time for which compute waited for copies.
        predicted_peak_gib: device memory that saved activations hold at most, by plan; None without one.
        measured_peak_gib: the same, counted; None before the first backward is over.
        plain_peak_gib: the same if all were kept, counted.
        predicted_step_ms: forward and backward, by plan; None without one.
        measured_step_ms: the same, measured from the first save to the end of backward. Reading it waits for that end.
    """

    bytes_kept: int
    bytes_moved: int
    bytes_recomputed: int
    bytes_weights: int
    bytes_deduplicated: int
    host_bytes_live: int
    host_bytes_pinned: int
    num_host_allocations: int
    disk_bytes_live: int
    disk_bytes_held: int
    disk_bytes_written: int
    stall_ms: float
    predicted_peak_gib: float | None
    measured_peak_gib: float | None
    plain_peak_gib: float | None
    predicted_step_ms: float | None
    measured_step_ms: float | None


@dataclass
class OffloadCounters:
    """Counts of all contexts of an offloader, in bytes of saved tensors.

    Attributes:
        subclasses: types already logged.
        largest_small_bytes: the largest storage below the threshold.
    """

    bytes_kept: int = 0
    bytes_weights: int = 0
    bytes_recomputed: int = 0
    bytes_deduplicated: int = 0
    largest_small_bytes: int = 0
    subclasses: set[str] = field(default_factory=set)
