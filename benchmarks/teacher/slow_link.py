"""A copier with a slower link than the machine's, to measure a teacher's cost on other machines."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cells import UnavailableError
from hf_memopt.transfer import StreamCopier, Transfer

_PROBE_BYTES = 64 * 2**20
_PROBE_CYCLES = 10_000_000


class SlowLinkCopier(StreamCopier):
    """A copier whose copies to the device take as long as at `gb_per_s`, in units of 1e9 bytes. CUDA only.

    After a copy the copy stream sleeps for the rest of that time. The sleep occupies one thread of one multiprocessor,
    which hardly disturbs compute.

    Raises:
        UnavailableError: the machine's own link is slower.
    """

    def __init__(self, device: torch.device, gb_per_s: float) -> None:
        super().__init__(device)
        host, there = self.empty_host(_PROBE_BYTES), self.empty_device(_PROBE_BYTES)
        own_gb_per_s = 1e-9 * _PROBE_BYTES / _seconds(lambda: there.copy_(host, non_blocking=True))
        if own_gb_per_s < gb_per_s:
            raise UnavailableError(f"this machine's link has {own_gb_per_s:.1f} GB/s, less than {gb_per_s:g}")
        cycles_per_s = _PROBE_CYCLES / _seconds(lambda: torch.cuda._sleep(_PROBE_CYCLES))
        self._cycles_per_byte = 1e-9 * (1 / gb_per_s - 1 / own_gb_per_s) * cycles_per_s

    def to_device(self, source: Tensor, destination: Tensor) -> Transfer:
        """Copy, then sleep; the returned transfer ends after the sleep."""
        self.bytes_to_device += source.nbytes
        self._copy(source, destination, self._stream_to_device)
        with self._stream_to_device:
            torch.cuda._sleep(int(self._cycles_per_byte * source.nbytes))
        # An empty copy after the sleep marks the end.
        return self._copy(source[:0], destination[:0], self._stream_to_device)


def _seconds(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few runs."""
    durations = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        durations.append(time.perf_counter() - begun)
    return min(durations)
