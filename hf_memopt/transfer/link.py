"""How fast the link between device and host is, measured."""

import statistics
from collections.abc import Callable

from hf_memopt.transfer import Copier, Transfer
from hf_memopt.transfer.clock import Clock
from hf_memopt.units import MIB

_PROBE_BYTES = 16 * MIB
_REPEATS = 5


def measure_link(copier: Copier, clock: Clock) -> tuple[float, float]:
    """Bytes per second to the host and to the device, the median of a few copies of 16 MiB each; waits for the device.

    The first copy of each direction is not counted: it touches its memory for the first time.
    """
    host, device = copier.empty_host(_PROBE_BYTES), copier.empty_device(_PROBE_BYTES)
    speeds = (
        _bytes_per_s(lambda: copier.to_host(device, host), clock),
        _bytes_per_s(lambda: copier.to_device(host, device), clock),
    )
    copier.release(device)
    copier.release(host)
    return speeds


def _bytes_per_s(copy: Callable[[], Transfer], clock: Clock) -> float:
    seconds = []
    for _ in range(1 + _REPEATS):
        begun = clock.mark()
        copy().wait()
        seconds.append(clock.elapsed_s(begun, clock.mark()))
    return _PROBE_BYTES / statistics.median(seconds[1:])
