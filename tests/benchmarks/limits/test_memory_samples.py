import os
import subprocess
import sys
import time

import pytest

from benchmarks.limit.limited_process import read_sample, sampling
from hf_memopt.units import MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Touches memory, maps a file of the same size, and reserves as much again; then waits.
HOLDS = """
import mmap, sys, tempfile
size = 64 * 2**20
with tempfile.TemporaryFile() as file:
    file.truncate(size)
    held = [bytearray(b"x") * size, mmap.mmap(file.fileno(), size), mmap.mmap(-1, size, mmap.MAP_PRIVATE)]
    held[1][::4096] = b"y" * (size // 4096)
print("holds", flush=True)
sys.stdin.read()
"""


def test_samples_tell_anonymous_memory_from_files_and_reservations() -> None:
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], **pipes()) as empty:
        assert empty.stdout is not None
        empty.stdout.readline()
        base = read_sample(empty.pid)
        empty.communicate(b"\n")
    with subprocess.Popen(command, **pipes()) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = read_sample(process.pid)
        process.communicate(b"")
    assert base is not None
    assert found is not None
    differences = [(now - before) / (64 * MIB) for before, now in zip(base[1:], found[1:], strict=True)]
    assert differences == pytest.approx([1, 2], abs=0.1)


def pipes() -> dict[str, int]:
    return {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def test_a_process_that_has_ended_has_no_memory() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still known
    assert read_sample(process.pid) is None
    process.wait()
    assert read_sample(process.pid) is None


def test_the_sampler_sees_a_short_peak_and_stops_with_its_context() -> None:
    with sampling(os.getpid(), interval_s=0.001) as samples:
        held = bytearray(128 * MIB)
        time.sleep(0.05)
        del held
        time.sleep(0.05)
    count = len(samples)
    used = [sample.anonymous_bytes for sample in samples]
    assert max(used) - used[-1] > 100 * MIB
    time.sleep(0.02)
    assert len(samples) == count
