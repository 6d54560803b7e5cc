"""A command below a memory limit from its start: its end, its memory over time, and the JSON lines that it prints."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.limit.limited_process import INTERVAL_S, Sample, read_sample
from benchmarks.limit.limits import ControlGroup, MemoryLimit
from hf_memopt.units import MIB

Line = dict[str, Any]
TIMEOUT_S = 400.0
# Memory of the command `hf-memopt fit` itself, and what the kernel and its page cache keep for its processes.
COMMAND_BYTES = 60 * MIB


@dataclass(frozen=True)
class WatchedRun:
    """A command that has ended."""

    end: str  # "finished", "killed" at the limit, "too slow", or "stopped" with another status than 0
    status: int
    wall_s: float
    samples: list[Sample]  # memory of the largest of its processes
    lines: list[Line]  # with the time of each as "at_s"
    text: str  # all that it has printed

    @property
    def peak_bytes(self) -> int:
        return max(each.anonymous_bytes for each in self.samples)

    def printed(self, name: str) -> list[Any]:
        """Return the values that the lines give a name, in order."""
        return [line[name] for line in self.lines if name in line]


def limit_in_force(limit_bytes: float) -> int:
    """Return the limit to enforce where `fit` has one to keep, which it does within 5 % and 20 MiB."""
    return round(1.05 * limit_bytes + 20 * MIB)


def watch(
    command: Sequence[str],
    log: Path,
    limit: MemoryLimit,
    limit_bytes: int | None,
    *,
    timeout_s: float = TIMEOUT_S,
    show: Callable[[Line], None] = lambda line: None,
) -> WatchedRun:
    """Run a command until it ends.

    Args:
        command: prints lines of JSON among others.
        log: file for all that it prints.
        limit: of all its processes; of each one where it is no control group.
        limit_bytes: the limit, which holds from the start of the command. None sets no limit.
        timeout_s: after which it is ended.
        show: called with each line of JSON.
    """
    begun = time.monotonic()
    if limit_bytes is not None and isinstance(limit, ControlGroup):
        limit.set(0, limit_bytes)
    process = subprocess.Popen(
        limit.command(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    )
    if limit_bytes is not None and not isinstance(limit, ControlGroup):
        limit.set(process.pid, limit_bytes)
    overdue = threading.Timer(timeout_s, _end_all, [process.pid])
    overdue.start()
    samples: list[Sample] = []
    sampling = threading.Thread(target=_sample, args=[process, samples])
    sampling.start()
    lines, texts = [], []
    assert process.stdout is not None
    for raw in process.stdout:
        text = raw.decode(errors="replace")
        texts.append(text)
        if text.startswith("{") and (line := _parsed(text)) is not None:
            lines.append(line | {"at_s": time.monotonic()})
            show(line)
    status = process.wait()
    sampling.join()
    is_overdue = not overdue.is_alive()
    overdue.cancel()
    log.write_text("".join(texts), encoding="utf-8")
    killed = limit.num_kills() > 0 or status in (-signal.SIGKILL, 128 + signal.SIGKILL)
    end = "finished" if status == 0 else "too slow" if is_overdue else "killed" if killed else "stopped"
    return WatchedRun(end, status, time.monotonic() - begun, samples, lines, "".join(texts))


def _parsed(text: str) -> Line | None:
    try:
        found = json.loads(text)
    except ValueError:  # others print dictionaries, too
        return None
    return found if isinstance(found, dict) else None


def _sample(process: "subprocess.Popen[bytes]", samples: list[Sample]) -> None:
    while process.poll() is None:
        found = [read_sample(each) for each in _tree(process.pid)]
        largest = max((each for each in found if each), key=lambda each: each.anonymous_bytes, default=None)
        if largest is not None:
            samples.append(largest)
        time.sleep(INTERVAL_S)


def _tree(process: int) -> list[int]:
    try:
        return [process, *(each.pid for each in psutil.Process(process).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _end_all(process: int) -> None:
    for each in reversed(_tree(process)):
        psutil.Process(each).kill()
