"""Time as the compute stream sees it, replaceable in tests, and measured speed of copies."""

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from hf_memopt.transfer.copier import Copier, Transfer
from hf_memopt.units import MIB


class Clock(Protocol):
    """Marks moments of the compute stream without waiting for them."""

    def mark(self) -> Any:
        """Return the moment at which the compute stream has done all work submitted so far."""

    def reached(self, mark: Any) -> bool:
        """Return whether that moment is known to be over."""

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Seconds between two marks, never negative; waits until both are reached."""


class SecondsClock:
    """Marks in seconds, read from a function."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s

    def mark(self) -> float:
        return self._now_s()

    def reached(self, mark: float) -> bool:
        return True

    def elapsed_s(self, start: float, end: float) -> float:
        return max(0.0, end - start)  # a backward may run in another thread


class HostClock(SecondsClock):
    """Marks in the CPU time of the thread, so that other processes make no pass longer."""

    def __init__(self) -> None:
        super().__init__(time.thread_time)


class StreamClock:
    """Events on an accelerator's current stream; a mark costs a microsecond or two."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    def mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        return torch.accelerator.current_stream(self._device).record_event(event)

    def reached(self, mark: torch.Event) -> bool:
        return mark.query()

    def elapsed_s(self, start: torch.Event, end: torch.Event) -> float:
        start.synchronize()
        end.synchronize()
        # Marks of two streams may lie the other way round.
        return max(0.0, 1e-3 * start.elapsed_time(end))


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
