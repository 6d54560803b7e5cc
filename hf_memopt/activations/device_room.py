"""Memory of a device that saved activations may hold beside everything else, measured while passes are recorded."""

import os

import torch

from hf_memopt.memory.device_counters import Counters, counters_for
from hf_memopt.transfer.backends import backend_of

# Share of the process's memory that a plan may use; fragmentation and slightly larger steps take the rest.
USABLE = 0.95


class DeviceRoom:
    """The memory that a device has left for saved activations.

    While a pass is recorded, the process's peak memory counters are reset whenever a tensor is saved or used: the peak
    of each stretch, less the bytes of saved activations, is the need of everything else.
    """

    def __init__(self, counters: Counters, device: torch.device) -> None:
        self._counters, self._device = counters, device
        self._begun_bytes = self._lasting_bytes = self._other_bytes = self._peak_bytes = 0
        self._num_retries = self._num_ooms = 0

    def begin(self) -> None:
        self._begun_bytes = self._other_bytes = self._counters.read().allocated_bytes
        self._counters.reset_peaks()

    def sample(self, saved_bytes: int) -> None:
        self._other_bytes = max(self._other_bytes, self._counters.read().peak_allocated_bytes - saved_bytes)

    def end(self, saved_bytes: int) -> None:
        """Note that backward is over: memory allocated now, gradients included, does not depend on the batch."""
        self.sample(saved_bytes)
        self._lasting_bytes = max(self._begun_bytes, self._counters.read().allocated_bytes - saved_bytes)

    def restart(self) -> None:
        self._counters.reset_peaks()

    def limit_bytes(self) -> int:
        """Return the bytes that saved activations may hold in the next pass: `USABLE` of the memory that the process
        has or could have (this rank's part of the free memory), less the recorded need of everything else and memory
        allocated for good since, such as optimizer states.
        """
        memory = self._counters.read()
        free_bytes, total_bytes = self._counters.free_and_total()
        if self._device.type == "cuda":
            total_bytes = int(torch.cuda.get_per_process_memory_fraction(self._device) * total_bytes)
        ranks, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
        ranks_per_device = max(1, -(-ranks // max(1, devices)))
        capacity = min(memory.reserved_bytes + free_bytes // ranks_per_device, total_bytes)
        return int(USABLE * capacity) - self._other_bytes - (memory.allocated_bytes - self._begun_bytes)

    def grow(self, ratio: float) -> None:
        """Note that passes, and the other memory that they need, are `ratio` times the recorded one."""
        self._other_bytes += int((ratio - 1) * max(0, self._other_bytes - self._lasting_bytes))

    def look_back(self, saved_peak_bytes: int) -> None:
        """Learn from a pass: if more was allocated than ever before, everything else needs more than was recorded."""
        peak_bytes = self._counters.read().peak_allocated_bytes
        if peak_bytes > self._peak_bytes:
            self._peak_bytes = peak_bytes
            self._other_bytes = max(self._other_bytes, peak_bytes - saved_peak_bytes)

    def watch(self) -> None:
        memory = self._counters.read()
        self._num_retries, self._num_ooms = memory.num_alloc_retries, memory.num_ooms

    def ran_short(self) -> bool:
        """Return whether the allocator has returned its cache to the device since `watch`: nothing was left."""
        return self._counters.read().num_alloc_retries > self._num_retries

    def ran_out(self) -> bool:
        return self._counters.read().num_ooms > self._num_ooms


def room_on(device: torch.device) -> DeviceRoom | None:
    if backend_of(device).is_unlimited:
        return None
    counters = counters_for(device)
    return None if counters is None else DeviceRoom(counters, device)
