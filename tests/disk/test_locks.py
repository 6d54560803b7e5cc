"""One process writes; others learn who does. Processes here import nothing but the lock."""

import errno
import fcntl
import json
import logging
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hf_memopt.disk.locks import WriterLock


def make(folder: Path) -> WriterLock:
    return WriterLock(folder / ".lock", f"checkpoints in {folder}", "name another folder")


def start(folder: Path, body: str) -> subprocess.Popen[str]:
    """A process with a lock of its own on the folder, held when this returns."""
    code = f"""
import os, sys, signal
from pathlib import Path
from hf_memopt.disk.locks import WriterLock
lock = WriterLock(Path({str(folder)!r}) / ".lock", "theirs", "leave")
lock.acquire()
print("held", flush=True)
{body}
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def finish(process: subprocess.Popen[str]) -> int:
    process.communicate("go on\n")
    return process.returncode


def sign(folder: Path, **changes: object) -> None:
    """The lock file of a process that has died."""
    owner = {"host": socket.gethostname(), "pid": 4711, "since": "2026-11-22T10:00:00+00:00", **changes}
    (folder / ".lock").write_text(json.dumps(owner))


def assert_free(folder: Path) -> None:
    with make(folder):
        owner = json.loads((folder / ".lock").read_text())
        assert owner["host"] == socket.gethostname()
    assert list(folder.iterdir()) == []


def test_a_second_process_is_told_who_writes_since_when_and_what_to_do(tmp_path: Path) -> None:
    process = start(tmp_path, "sys.stdin.readline()")
    message = (
        rf"^checkpoints in {tmp_path}: process {process.pid} on {socket.gethostname()}, since 20\d\d-\S+ \S+ "
        r"\(0:\d\d:\d\d ago\), is writing there\. Wait for it or stop it, or name another folder$"
    )
    with pytest.raises(ValueError, match=message):
        make(tmp_path).acquire()
    assert finish(process) == 0
    assert_free(tmp_path)


@pytest.mark.parametrize("body", ["", "sys.exit(3)", "raise KeyError", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_whatever_ends_a_process_its_lock_is_free(tmp_path: Path, body: str) -> None:
    finish(start(tmp_path, body))
    assert_free(tmp_path)


def test_an_exception_in_the_block_releases(tmp_path: Path) -> None:
    with pytest.raises(KeyError), make(tmp_path):
        raise KeyError
    assert_free(tmp_path)


def test_a_lock_is_held_once_and_releases_as_often_as_one_likes(tmp_path: Path) -> None:
    lock = make(tmp_path)
    lock.release()
    with lock:
        lock.acquire()
        with pytest.raises(ValueError, match="is writing there"):
            make(tmp_path).acquire()
        with make(tmp_path / ".."):
            pass
    lock.release()
    assert_free(tmp_path)


FORK = """
child = os.fork()
if not child:
    lock.release()
    {child}
"""


def test_the_child_of_a_fork_does_not_release(tmp_path: Path) -> None:
    process = start(tmp_path, FORK.format(child="sys.exit()") + "os.waitpid(child, 0)\nsys.stdin.readline()")
    with pytest.raises(ValueError, match=f"process {process.pid} on"):
        make(tmp_path).acquire()
    finish(process)


def test_the_child_of_a_fork_does_not_keep_what_its_dead_parent_held(tmp_path: Path) -> None:
    body = FORK.format(child="os.write(writer, b'.'); sys.stdin.readline(); sys.exit()")
    body = f"reader, writer = os.pipe()\n{body}\nos.read(reader, 1)\nos.kill(os.getpid(), signal.SIGKILL)"
    process = start(tmp_path, body)
    process.wait()
    assert_free(tmp_path)
    finish(process)


def test_what_another_machine_has_left_is_taken_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sign(tmp_path, host="node7")
    with make(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["host"] == socket.gethostname()
    (warning,) = (record.message for record in caplog.records)
    assert re.search(r"process 4711 on node7, since 2026-11-22 10:00:00\S* \(.* ago\), left its lock there", warning)
    assert_free(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "null", '{"host": 1', "[" * 100_000, '{"host": "a", "since": "?"}'])
def test_a_lock_file_that_nobody_holds_and_nobody_can_read_is_taken(tmp_path: Path, content: str) -> None:
    (tmp_path / ".lock").write_text(content)
    assert_free(tmp_path)


def test_a_lock_that_its_owner_has_just_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, removed = fcntl.flock, []

    def remove_first(opened: object, operation: int) -> None:
        flock(opened, operation)  # type: ignore[arg-type]
        if not removed:
            removed.append((tmp_path / ".lock").unlink())

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with make(tmp_path), pytest.raises(ValueError, match="is writing there"):
        make(tmp_path).acquire()


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(opened: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), make(tmp_path):
        pass
    assert "this file system cannot lock files (No locks available)" in caplog.text


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        make(tmp_path / "nowhere").acquire()
