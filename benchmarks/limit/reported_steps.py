"""Training steps of a process that another one limits and watches: each event is a line of JSON in a pipe.

`rest` when everything but saved activations is in memory; the watching process then sets the limit and answers with a
line on standard input. `step` after each step. At the end `finished`, or `raised` if memory could not be allocated.
"""

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

Step = Callable[[], float]  # returns its loss


def report_steps(step: Step, num_steps: int, pipe: int, results: Callable[[], dict[str, Any]]) -> int:
    """Run the steps between two events in `pipe`, a descriptor; return the exit status.

    `results` is called after the last step; its entries become those of the event `finished`.
    """
    with os.fdopen(pipe, "w", buffering=1) as events:

        def report(name: str, **entries: Any) -> None:
            print(json.dumps({"event": name, "at_s": time.monotonic(), **entries}), file=events)

        report("rest")
        sys.stdin.readline()
        sent_to_disks = psutil.Process().io_counters  # mapped pages that this process has dirtied included
        begun_s, begun_cpu_s, begun_bytes = time.perf_counter(), time.process_time(), sent_to_disks().write_bytes
        try:
            for _ in range(num_steps):
                report("step", loss=step(), cpu_s=time.process_time() - begun_cpu_s)
        except (MemoryError, RuntimeError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            report("raised", error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return 1
        costs = {
            "cpu_s": time.process_time() - begun_cpu_s,
            "wall_s": time.perf_counter() - begun_s,
            "written_bytes": sent_to_disks().write_bytes - begun_bytes,
        }
        report("finished", **costs, **results())
    return 0


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocation on the CPU has failed: Python's, torch's, or a mapping of the system."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)
