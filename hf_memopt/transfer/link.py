"""Measured speed of the link between device and host."""

import statistics
from collections.abc import Callable

from hf_memopt.transfer.clock import Clock
from hf_memopt.transfer.copier import Copier, Transfer
from hf_memopt.units import MIB

PROBE_BYTES = 16 * MIB


def measure_link(copier: Copier, clock: Clock) -> tuple[float, float]:
    """Bytes per second to the host and to the device, each the median of copies of 16 MiB; waits for the device."""
    host, device = copier.empty_host(PROBE_BYTES), copier.empty_device(PROBE_BYTES)
    speeds = (
        bytes_per_s(lambda: copier.to_host(device, host), PROBE_BYTES, clock),
        bytes_per_s(lambda: copier.to_device(host, device), PROBE_BYTES, clock),
    )
    copier.release(device)
    copier.release(host)
    return speeds


def bytes_per_s(copy: Callable[[], Transfer], num_bytes: int, clock: Clock, repeats: int = 5) -> float:
    """Median speed of a copy that is begun `1 + repeats` times; the first touches its memory for the first time."""
    seconds = []
    for _ in range(1 + repeats):
        begun = clock.mark()
        copy().wait()
        seconds.append(clock.elapsed_s(begun, clock.mark()))
    return num_bytes / statistics.median(seconds[1:])
