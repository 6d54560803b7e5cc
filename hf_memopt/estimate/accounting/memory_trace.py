"""The changes of device memory over a simulated run, and what can be read off them."""

from dataclasses import dataclass
from itertools import accumulate

from hf_memopt.estimate.accounting.caching_allocator import CachingAllocator, OutOfDeviceMemoryError, replay
from hf_memopt.units import MIB

_STEP_BYTES = 2 * MIB


@dataclass(frozen=True)
class Trace:
    """Device memory over time.

    Attributes:
        storages: which storage each change belongs to, by number.
        changes: bytes, in order; positive when a storage is born, negative when it dies.
        phases: the phase of each change.
        positions: of each change in the ledger's log, which counts host memory too.
        first_step: index of the change at which the first step begins.
    """

    storages: tuple[int, ...]
    changes: tuple[int, ...]
    phases: tuple[str, ...]
    positions: tuple[int, ...]
    first_step: int

    def held(self) -> list[int]:
        """Bytes held after each change."""
        return list(accumulate(self.changes))

    def peak(self) -> tuple[int, int]:
        """The most that is held at one time from the first step on, and the index of the change that made it so."""
        held = self.held()
        position = max(range(min(self.first_step, len(held) - 1), len(held)), key=held.__getitem__)
        return held[position], position

    def peaks_by_phase(self) -> dict[str, int]:
        peaks: dict[str, int] = {}
        for held, phase in list(zip(self.held(), self.phases, strict=True))[self.first_step :]:
            peaks[phase] = max(peaks.get(phase, 0), held)
        return peaks

    def allocator(self, capacity_bytes: int | None = None) -> CachingAllocator:
        """CUDA's caching allocator, by its model, at the end of the run.

        Its `peak_allocated_bytes` are those since the first step began. They exceed what tensors hold where the rest
        of a block was too small to be split off.

        Raises:
            OutOfDeviceMemoryError: the run does not fit into `capacity_bytes`.
        """
        return replay(self.storages, self.changes, capacity_bytes, self.first_step)

    def fits(self, capacity_bytes: int) -> bool:
        """Whether the run goes through on a device with so much memory for the allocator."""
        try:
            self.allocator(capacity_bytes)
        except OutOfDeviceMemoryError:
            return False
        return True

    def smallest_capacity(self) -> int:
        """The least memory of a device on which the allocator gets through, to 2 MiB, by bisection."""
        failing, fitting = self.peak()[0] - 1, self.allocator().peak_reserved_bytes
        while fitting - failing > _STEP_BYTES:
            middle = (failing + fitting) // 2
            failing, fitting = (failing, middle) if self.fits(middle) else (middle, fitting)
        return fitting
