"""Memory of another process over time, read from `/proc` every few milliseconds."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hf_memopt.units import KIB

INTERVAL_S = 0.004


class Sample(NamedTuple):
    """Memory of a process at a moment.

    `anonymous_bytes` belong to no file, so that without swap the system cannot take them back; `private_bytes` are
    private and writable, touched or not, which `RLIMIT_DATA` limits.
    """

    at_s: float  # of `time.monotonic`, whose zero all processes share
    anonymous_bytes: int
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
    figures = (KIB * int(fields[name].split()[0]) for name in ("RssAnon", "VmData"))
    return Sample(time.monotonic(), *figures)


@contextmanager
def sampling(process: int, interval_s: float = INTERVAL_S) -> Iterator[list[Sample]]:
    """Yield a list to which a thread appends samples until the process or the context ends."""
    samples: list[Sample] = []
    stop = threading.Event()

    def read() -> None:
        while (sample := read_sample(process)) is not None:
            samples.append(sample)
            if stop.wait(interval_s):
                return

    thread = threading.Thread(target=read, name="memory samples")
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
