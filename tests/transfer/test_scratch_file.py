"""Tests of the disk's file: bytes, errors, forks, and space that comes back however a process ends."""

import errno
import fcntl
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from torch._logging._internal import warning_once

from hf_memopt.transfer import scratch_file
from hf_memopt.transfer.direct_io import PAGE, private_pages
from hf_memopt.transfer.scratch_file import DiskError, ScratchFile
from hf_memopt.units import MIB


@pytest.fixture(autouse=True)
def small_probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(scratch_file, "_PROBE_BYTES", PAGE)
    warning_once.cache_clear()
    yield
    gc.collect()


def some_bytes(num_bytes: int, offset: int = 0) -> torch.Tensor:
    memory = private_pages(num_bytes, offset)
    return memory.copy_(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8))


@pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, PAGE + 1, 8 * MIB, 8 * MIB + 1, 17 * MIB + 5])
@pytest.mark.parametrize("offset", [0, 64, PAGE - 16])
def test_bytes_come_back(tmp_path: Path, num_bytes: int, offset: int) -> None:
    file = ScratchFile(tmp_path)
    source, other = some_bytes(num_bytes, offset), some_bytes(num_bytes, offset)
    extents = [file.space.acquire(num_bytes) for _ in range(2)]
    for tensor, extent in zip((source, other), extents, strict=True):
        file.write(tensor, extent).wait()
    for tensor, extent in zip((source, other), extents, strict=True):
        destination = private_pages(num_bytes, offset)
        file.read(extent, destination).wait()
        assert torch.equal(destination, tensor)
    assert file.bytes_written == sum(extent.num_bytes for extent in extents)


def test_the_folder_stays_empty_and_space_comes_back_with_the_object(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    file.write(some_bytes(MIB), file.space.acquire(MIB)).wait()
    assert os.listdir(tmp_path) == []
    number = file._file.fileno()
    del file
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_failed_transfer_raises_at_every_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ScratchFile(tmp_path)
    extent = file.space.acquire(MIB)

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "not shown")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fail)
        transfer = file.write(some_bytes(MIB), extent)
        for _ in range(3):
            with pytest.raises(DiskError, match=r"writing 1.00 MiB failed") as raised:
                transfer.wait()
            assert str(tmp_path) in str(raised.value)
            assert "Input/output error" in str(raised.value)
            assert raised.value.errno == errno.EIO
    file.write(some_bytes(MIB), extent).wait()


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    extent = file.space.acquire(MIB)
    file.write(some_bytes(MIB), extent).wait()
    os.ftruncate(file._file.fileno(), PAGE)
    with pytest.raises(DiskError, match=r"reading 1.00 MiB failed.*the file ends at byte 4096"):
        file.read(extent, private_pages(MIB)).wait()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_folder_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    file = ScratchFile(tmp_path)

    def fail(*args: object) -> None:
        raise OSError(number, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", fail)
        with pytest.raises(DiskError, match=r"cannot take 1.00 MiB more: .*; free space there") as raised:
            file.space.acquire(MIB)
    assert str(tmp_path) in str(raised.value)
    assert file.space.bytes_held == 0
    assert file.space.acquire(MIB) is not None


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="cannot make a file: No such file or directory"):
        ScratchFile(tmp_path / "missing")


def test_without_direct_io_there_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: int, is_wanted: bool = True) -> None:
        if is_wanted:
            raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(scratch_file, "bypass_page_cache", refuse)
    for _ in range(2):
        file = ScratchFile(tmp_path)
        assert not fcntl.fcntl(file._file.fileno(), fcntl.F_GETFL) & os.O_DIRECT
    source, destination, extent = some_bytes(MIB, 64), private_pages(MIB, 64), file.space.acquire(MIB)
    file.write(source, extent).wait()
    file.read(extent, destination).wait()
    assert torch.equal(source, destination)
    assert len([record for record in caplog.records if "no direct I/O" in record.message]) == 1


@pytest.mark.parametrize(
    ("kind", "says"), [("tmpfs", "which is host memory"), ("nfs4", "on a network"), ("ext4", None), ("", None)]
)
def test_file_systems_that_help_little_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, says: str | None
) -> None:
    monkeypatch.setattr(scratch_file, "file_system", lambda folder: kind)
    ScratchFile(tmp_path)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert bool(warnings) == (says is not None)
    assert says is None or (says in warnings[0] and kind in warnings[0])


# ---------------------------------------------------------------------------------------------------- forks and kills

_KILLED = """
import os, sys, time
import torch
from hf_memopt.transfer import scratch_file
scratch_file._PROBE_BYTES = 4096
file = scratch_file.ScratchFile(sys.argv[1])
memory = torch.zeros(4 << 20, dtype=torch.uint8)
extents = [file.space.acquire(memory.nbytes) for _ in range(4)]
if sys.argv[2] == "forks" and os.fork() == 0:
    os.write(1, b"worker %d\\n" % os.getpid())
    time.sleep(600)
os.write(1, b"begun\\n")
while True:
    for extent in extents:
        file.write(memory, extent)
        file.read(extent, memory).wait()
"""


@contextmanager
def started(folder: Path, way: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that writes and reads in a folder, alone or beside a worker that it forks; ends it."""
    command = [sys.executable, "-c", _KILLED, str(folder), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.e2e
def test_kills_at_any_moment_leave_no_file(tmp_path: Path) -> None:
    dice = random.Random(0)
    for _ in range(5):
        with started(tmp_path, "alone") as process:
            assert process.stdout is not None
            if dice.random() < 0.7:
                process.stdout.readline()
            time.sleep(dice.random())
            process.send_signal(signal.SIGKILL)
        assert os.listdir(tmp_path) == []


def test_a_worker_that_outlives_a_killed_process_holds_no_space(tmp_path: Path) -> None:
    with started(tmp_path, "forks") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(2)]
        worker = psutil.Process(next(int(line[1]) for line in lines if line[0] == "worker"))
        assert any("(deleted)" in link for link in open_files(process.pid))  # a positive control
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert worker.is_running()
        assert not any(str(tmp_path) in link for link in open_files(worker.pid))
        worker.kill()


def open_files(process: int) -> list[str]:
    links = Path(f"/proc/{process}/fd").iterdir()
    return [os.readlink(link) for link in links if link.exists() or link.is_symlink()]


def test_a_fork_is_told_that_the_file_is_not_its_own(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    extent = file.space.acquire(PAGE)
    transfer = file.write(some_bytes(PAGE), extent)
    transfer.wait()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answers = []
        for attempt in (transfer.wait, lambda: file.write(torch.zeros(PAGE, dtype=torch.uint8), extent)):
            try:
                attempt()
                answers.append("nothing")
            except DiskError as error:
                answers.append(str(error))
        os.write(writer, "|".join(answers).encode())
        os._exit(0)
    os.waitpid(child, 0)
    answers = os.read(reader, 10_000).decode().split("|")
    os.close(reader)
    os.close(writer)
    assert len(answers) == 2
    assert all("of which this is a fork" in answer for answer in answers)
    destination = private_pages(PAGE)
    file.read(extent, destination).wait()


def test_memory_for_reads_is_empty_in_forks() -> None:
    memory = private_pages(PAGE)
    address = memory.data_ptr()
    smaps = Path("/proc/self/smaps").read_text().splitlines()
    found = next(number for number, line in enumerate(smaps) if is_inside(line, address))
    vm_flags = next(line for line in smaps[found:] if line.startswith("VmFlags"))
    assert "wf" in vm_flags.split()  # the kernel's name for "wipe on fork"


def is_inside(line: str, address: int) -> bool:
    head = line.split()[0]
    if "-" not in head or ":" in head:
        return False
    start, end = (int(part, 16) for part in head.split("-"))
    return start <= address < end
