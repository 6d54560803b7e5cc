"""Peak memory of each phase of a training step."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch

from hf_memopt.memory.device_counters import Counters, DeviceMemory, Host, HostMemory, counters_for


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The most memory that a phase held, in bytes; fields that the device has no counters for are None.

    Attributes:
        at_least_bytes: the phase's peak of allocated device memory was not lower.
        at_most_bytes: and not higher. Both are equal where the peak is known exactly.
        reserved_bytes: highest reserved memory at the phase's ends. It shrinks only when the cache is emptied.
        inactive_split_bytes: likewise, of memory that lies unusable between tensors in use.
        num_alloc_retries: how often the allocator ran out in this phase and had to return its cache.
        host_rss_bytes: highest resident host memory at the phase's ends; None where the device has counters.
    """

    at_least_bytes: int | None = None
    at_most_bytes: int | None = None
    reserved_bytes: int | None = None
    inactive_split_bytes: int | None = None
    num_alloc_retries: int | None = None
    host_rss_bytes: int | None = None

    @property
    def exact(self) -> bool:
        """Return whether the peak of device memory is known to the byte."""
        return self.at_least_bytes is not None and self.at_least_bytes == self.at_most_bytes

    @property
    def certain_bytes(self) -> int:
        """Return the bytes that the phase held for certain: the device's, or the host's where there are no counters."""
        return self.at_least_bytes or self.host_rss_bytes or 0

    def joined(self, other: "PhasePeak") -> "PhasePeak":
        """Return the peak over two intervals."""
        found = {each.name: _largest(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        ours, theirs = self.num_alloc_retries, other.num_alloc_retries
        found["num_alloc_retries"] = None if ours is None or theirs is None else ours + theirs
        return PhasePeak(**found)


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """Device memory at one moment, in bytes; `elsewhere_bytes` are those outside of this process's allocator."""

    counters: DeviceMemory
    highest_bytes: int
    total_bytes: int
    elsewhere_bytes: int

    @property
    def fragmentation_bytes(self) -> int:
        return self.counters.reserved_bytes - self.counters.allocated_bytes

    @property
    def room_bytes(self) -> int:
        """Return the bytes that this process's tensors could have at most."""
        return self.total_bytes - self.elsewhere_bytes


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory at one moment; `device` is None where torch keeps no counters."""

    device: DeviceReading | None
    host: HostMemory


class MemoryTracker:
    """Measures the peak memory of each phase of a training step, without waiting for the device.

    Example:
        >>> tracker = MemoryTracker("cuda")
        >>> for batch in batches:
        ...     with tracker.phase("forward"):
        ...         loss = model(batch)
        ...     with tracker.phase("backward"):
        ...         loss.backward()
        ...     with tracker.phase("optimizer"):
        ...         optimizer.step()
        ...     tracker.step()
        >>> tracker.peaks["backward"].at_most_bytes

    Phases may have any name, repeat, and nest: an outer one includes its inner ones. Each beginning and end costs one
    reading of the counters: microseconds. One tracker belongs to one thread.

    A process has one peak counter per device, and training loops read it too: lerobot does in every step, Trainer with
    `skip_memory_metrics=False`. By default the tracker therefore never resets it. Then a phase's peak is exact if the
    process's peak grew in it, and is otherwise known to lie between the bytes allocated at the phase's ends and the
    process's peak (`at_least_bytes`, `at_most_bytes`). If other code resets the counter within a phase, the part before
    the reset is known from its beginning only.

    Args:
        device: where the model runs; None, the current accelerator, or the CPU without one. A CPU has no counters: the
            figures are those of host memory.
        reset_peaks: reset the peak counter at each beginning and end of a phase, which makes every peak exact. Only
            where nothing else reads the counter.
        counters: where to read from; None, the device's own.
    """

    def __init__(
        self, device: torch.device | str | None = None, *, reset_peaks: bool = False, counters: Counters | None = None
    ) -> None:
        if device is None:
            device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        self.device = torch.device(device)
        self._counters = counters if counters is not None else counters_for(self.device)
        self._reset_peaks = reset_peaks
        self._host = Host()
        # The figures at the last end of a phase: of the device, or without counters of the host.
        self._now = None if self._counters is None else self._counters.read()
        self._rss_bytes = self._host.rss_bytes()
        self._highest_bytes = self._rss_bytes if self._now is None else self._now.peak_allocated_bytes
        self._open: list[str] = []
        self._step: dict[str, PhasePeak] = {}
        self._peaks: dict[str, PhasePeak] = {}
        self.num_steps = 0

    @property
    def peaks(self) -> dict[str, PhasePeak]:
        """The peak of each phase over all steps so far, in the order in which they first appeared."""
        return _join(self._peaks, self._step)

    @property
    def peak_phase(self) -> str | None:
        """The phase that is known to have held most, the later one of equals, or None before the first has ended."""
        peaks = self.peaks
        return max(reversed(peaks), key=lambda name: peaks[name].certain_bytes, default=None)

    @property
    def has_counters(self) -> bool:
        """Return whether figures are those of device memory; otherwise they are those of host memory."""
        return self._counters is not None

    @property
    def highest_bytes(self) -> int:
        """The most that tensors held up to the last end of a phase; without counters, the most resident host memory."""
        return self._highest_bytes

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the memory of the code inside to the phase `name`."""
        self._boundary()
        self._open.append(name)
        try:
            yield
        finally:
            self._boundary()
            if name in self._open:  # unless step() or switch_to() has ended it
                self._open.remove(name)

    def switch_to(self, name: str | None) -> None:
        """End the running phase, if any, and begin `name`, or none; for callbacks, which cannot enclose a phase."""
        self._boundary()
        self._open = [] if name is None else [name]

    def step(self) -> dict[str, PhasePeak]:
        """End a training step, and with it all phases; returns the peak of each phase in this step."""
        self.switch_to(None)
        finished, self._step = self._step, {}
        self._peaks = _join(self._peaks, finished)
        self.num_steps += 1
        return finished

    def read(self, *, pss: bool = False) -> MemoryReading:
        """Return all that is known of memory now, for logging: asks driver and system. `pss` is as in `HostMemory`."""
        self._boundary()
        host = self._host.read(pss=pss)
        if self._counters is None or self._now is None:
            return MemoryReading(None, host)
        free_bytes, total_bytes = self._counters.free_and_total()
        elsewhere_bytes = max(0, total_bytes - free_bytes - self._now.reserved_bytes)
        return MemoryReading(DeviceReading(self._now, self._highest_bytes, total_bytes, elsewhere_bytes), host)

    def _boundary(self) -> None:
        # The stretch between two ends of phases counts for every open phase, so that outer phases include inner ones.
        self._step = _join(self._step, dict.fromkeys(self._open, self._interval()))

    def _interval(self) -> PhasePeak:
        """Return the peak since the last call; without counters, of host memory, of which only the ends are known."""
        if self._counters is None or self._now is None:
            rss_before, self._rss_bytes = self._rss_bytes, self._host.rss_bytes()
            self._highest_bytes = max(self._highest_bytes, self._rss_bytes)
            return PhasePeak(host_rss_bytes=max(rss_before, self._rss_bytes))
        before, now = self._now, self._counters.read()
        self._highest_bytes = max(self._highest_bytes, now.peak_allocated_bytes)
        self._now = now
        if self._reset_peaks:
            self._counters.reset_peaks()
            # The counter begins again at the bytes allocated.
            self._now = replace(now, peak_allocated_bytes=now.allocated_bytes)
        return _between(before, now)


def _between(before: DeviceMemory, now: DeviceMemory) -> PhasePeak:
    # The counter tells the highest peak since its last reset. If it has changed, that peak was reached in this
    # interval: it grew here, or was reset here and has begun again. If not, the interval's peak lies between the bytes
    # allocated at its ends and the counter.
    peak_bytes = now.peak_allocated_bytes
    at_least_bytes = now.allocated_bytes if peak_bytes == before.peak_allocated_bytes else peak_bytes
    return PhasePeak(
        at_least_bytes=max(at_least_bytes, before.allocated_bytes),
        at_most_bytes=max(peak_bytes, before.peak_allocated_bytes),
        reserved_bytes=max(before.reserved_bytes, now.reserved_bytes),
        inactive_split_bytes=max(before.inactive_split_bytes, now.inactive_split_bytes),
        num_alloc_retries=now.num_alloc_retries - before.num_alloc_retries,
    )


def _join(first: dict[str, PhasePeak], second: dict[str, PhasePeak]) -> dict[str, PhasePeak]:
    joined = dict(first)
    for name, peak in second.items():
        joined[name] = first[name].joined(peak) if name in first else peak
    return joined


def _largest(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)
