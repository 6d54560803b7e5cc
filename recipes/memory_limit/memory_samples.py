"""Memory of another process over time, read from `/proc` every few milliseconds."""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from hf_memopt.units import KIB

INTERVAL_S = 0.004


class Sample(NamedTuple):
    """Memory of a process at a moment.

    `anonymous_bytes` belong to no file, so that without swap the system cannot take them back; `resident_bytes` are
    those and pages of files; `private_bytes` are private and writable, touched or not, which `RLIMIT_DATA` limits.
    """

    at_s: float  # of `time.monotonic`, whose zero all processes share
    anonymous_bytes: int
    resident_bytes: int
    private_bytes: int


def read_sample(process: int) -> Sample | None:
    """Return the memory of a process now, by its id; None if it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines())
    if "RssAnon" not in fields:  # has ended, and has not been waited for yet
        return None
    figures = (KIB * int(fields[name].split()[0]) for name in ("RssAnon", "VmRSS", "VmData"))
    return Sample(time.monotonic(), *figures)


class Sampler:
    """Context manager: a thread that appends to `samples` until the process or the context ends."""

    def __init__(self, process: int, interval_s: float = INTERVAL_S) -> None:
        self.samples: list[Sample] = []
        self._process, self._interval_s = process, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="memory samples")

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        while (sample := read_sample(self._process)) is not None:
            self.samples.append(sample)
            if self._stop.wait(self._interval_s):
                return
