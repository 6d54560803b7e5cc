"""A process that trains by `report_steps`, under a memory limit, with its memory over time and the way it ended."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.limit.limits import MemoryLimit
from hf_memopt.units import KIB

Event = dict[str, Any]
INTERVAL_S = 0.004  # between samples of memory
# glibc returns blocks of 64 KiB and more when they are freed; threads that wait for each other sleep.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "MALLOC_MMAP_THRESHOLD_": str(2**16)}


class Sample(NamedTuple):
    """Memory of a process at a moment.

    `anonymous_bytes` belong to no file, so that without swap the system cannot take them back; `private_bytes` are
    private and writable, touched or not, which `RLIMIT_DATA` limits.
    """

    at_s: float  # of `time.monotonic`, whose zero all processes share
    anonymous_bytes: int
    private_bytes: int


@dataclass(frozen=True)
class LimitedRun:
    """A process that has ended."""

    end: str  # "finished", "raised" an error of allocation, "killed", or "too slow"
    reason: str | None  # the error or the signal, None if it has finished
    rest: Sample  # memory when the limit was set, between the set-up and the first step, which began at `rest.at_s`
    samples: list[Sample]  # memory from then on
    events: list[Event]  # of the steps and the end, as `report_steps` writes them

    @property
    def steps(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "step"]

    @property
    def losses(self) -> list[float]:
        return [event["loss"] for event in self.steps]

    @property
    def peak_bytes(self) -> int:
        """Return the most anonymous memory in use."""
        return max(sample.anonymous_bytes for sample in self.samples)

    @property
    def results(self) -> Event:
        """Return the last event: of a finished run, costs and results."""
        return self.events[-1] if self.events else {}

    def counted_rest(self, limit: MemoryLimit) -> int:
        """Return the bytes at rest of the kind that the limit counts."""
        return int(getattr(self.rest, limit.counted))


def run_limited(
    command: Sequence[str],
    limit: MemoryLimit,
    limit_bytes: int | None,
    *,
    log: Path,
    environ: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    show: Callable[[Event], None] = lambda event: None,
) -> LimitedRun:
    """Run a command, to which `--events=DESCRIPTOR` is added, until it ends.

    Args:
        command: trains by `report_steps`.
        limit: of this process alone.
        limit_bytes: memory that the process may use in all, from its event `rest` on; None, any.
        log: file for the process's own output.
        environ: variables that are added to this process's own.
        timeout_s: for all steps together; a process that takes longer is killed. At a limit the system may read pages
            of files again and again, and neither end the process nor let it go on.
        show: called with each event.

    Raises:
        RuntimeError: the process has failed for another reason than its memory.
    """
    readable, writable = os.pipe()
    whole = limit.command([*command, f"--events={writable}"])
    with log.open("wb") as output:
        process = subprocess.Popen(
            whole,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[writable],
        )
    os.close(writable)
    overdue = threading.Timer(timeout_s or 0.0, process.kill)
    with process, os.fdopen(readable) as lines:
        try:
            begun, rest = _read_event(lines.readline()), read_sample(process.pid)
            if begun is None or rest is None:
                process.wait()
                raise _failed(process, log)
            if limit_bytes is not None:
                limit.set(process.pid, limit_bytes)
            events = []
            if timeout_s is not None:
                overdue.start()
            with sampling(process.pid) as samples:
                assert process.stdin is not None
                process.stdin.write(b"\n")
                process.stdin.flush()
                for line in lines:
                    if (event := _read_event(line)) is not None:
                        events.append(event)
                        show(event)
            status = process.wait()
        except BaseException:
            overdue.cancel()
            process.kill()
            raise
    is_overdue = timeout_s is not None and not overdue.is_alive()
    overdue.cancel()
    end, reason = _end(status, events, limit.num_kills() > 0)
    if is_overdue:
        end, reason = "too slow", f"killed after {timeout_s:.0f} s"
    if end is None or (end == "killed" and limit_bytes is None):
        raise _failed(process, log)
    return LimitedRun(end, reason, rest, samples, events)


def _read_event(line: str) -> Event | None:
    """Return the event, or None for a line that its process has not completed."""
    if not line.endswith("\n"):
        return None
    event: Event = json.loads(line)
    return event


def _end(status: int, events: Sequence[Event], is_over_limit: bool) -> tuple[str | None, str | None]:
    last = events[-1] if events else {"event": "rest"}
    if status == 0 and last["event"] == "finished":
        return "finished", None
    if last["event"] == "raised":
        return "raised", last["error"]
    if status < 0:
        return "killed", "out of memory" if is_over_limit else signal.Signals(-status).name
    return None, None


def _failed(process: subprocess.Popen[bytes], log: Path) -> RuntimeError:
    tail = log.read_text(errors="replace")[-3000:]
    return RuntimeError(f"the process ended with status {process.returncode}; the end of its output, in {log}:\n{tail}")


def read_sample(process: int) -> Sample | None:
    """Return the memory of a process now, by its id, or None if it has ended."""
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
