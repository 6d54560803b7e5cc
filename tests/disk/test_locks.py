"""Tests that a second writer is refused at once; within a process, separately opened locks are as good as others'."""

import errno
import fcntl
import gc
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from hf_memopt.disk.files_on_disk import WriterLock, lock_of


def make(folder: Path) -> WriterLock:
    return WriterLock(folder / ".lock", f"checkpoints in {folder}", "name another folder")


def is_free(folder: Path) -> bool:
    try:
        with FileLock(folder / ".lock", blocking=False):
            return True
    except Timeout:
        return False


def start(folder: Path, body: str) -> subprocess.Popen[str]:
    """Return a process that holds a lock of its own on the folder, and imports only the lock."""
    code = f"""
import os, sys, signal
from pathlib import Path
from hf_memopt.disk.files_on_disk import WriterLock
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


def assert_free(folder: Path) -> None:
    lock = make(folder)
    lock.acquire()
    assert not is_free(folder)
    lock.release()
    assert is_free(folder)


def test_a_second_process_is_told_what_to_do(tmp_path: Path) -> None:
    process = start(tmp_path, "sys.stdin.readline()")
    message = (
        rf"^checkpoints in {tmp_path}: another process is writing there\. Wait for it or stop it, or name another "
        r"folder$"
    )
    with pytest.raises(ValueError, match=message):
        make(tmp_path).acquire()
    assert finish(process) == 0
    assert_free(tmp_path)


@pytest.mark.parametrize("body", ["", "sys.exit(3)", "raise KeyError", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_whatever_ends_a_process_its_lock_is_free(tmp_path: Path, body: str) -> None:
    finish(start(tmp_path, body))
    assert_free(tmp_path)


def test_a_lock_releases_as_often_as_one_likes_and_leaves_no_file(tmp_path: Path) -> None:
    lock = make(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    lock.release()
    lock.acquire()
    lock.acquire()
    assert not is_free(tmp_path / "new")
    lock.release()
    lock.release()
    assert list((tmp_path / "new").iterdir()) == []


def test_all_names_of_a_folder_have_one_lock_and_the_last_one_releases_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    locks = [lock_of(Path(name)) for name in ("run", "./run", "other/../run", "link")]
    for lock in locks:
        lock.acquire()
    lock_of(tmp_path / "other").acquire()
    monkeypatch.chdir("/")
    while locks:
        gc.collect()
        assert not is_free(tmp_path / "run")
        del locks[-1:], lock
        lock = None
    gc.collect()
    assert is_free(tmp_path / "run")


FORK = """
child = os.fork()
if not child:
    lock.release()
    {child}
"""


def test_the_child_of_a_fork_does_not_release(tmp_path: Path) -> None:
    process = start(tmp_path, FORK.format(child="sys.exit()") + "os.waitpid(child, 0)\nsys.stdin.readline()")
    with pytest.raises(ValueError, match="is writing there"):
        make(tmp_path).acquire()
    finish(process)


def test_the_child_of_a_fork_does_not_keep_what_its_dead_parent_held(tmp_path: Path) -> None:
    body = FORK.format(child="os.write(writer, b'.'); sys.stdin.readline(); sys.exit()")
    body = f"reader, writer = os.pipe()\n{body}\nos.read(reader, 1)\nos.kill(os.getpid(), signal.SIGKILL)"
    process = start(tmp_path, body)
    process.wait()
    assert_free(tmp_path)
    finish(process)


def test_a_lock_whose_file_its_owner_has_just_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the owner release its lock between the opening of the file and the locking."""
    flock, owner = fcntl.flock, make(tmp_path)
    owner.acquire()

    def release_first(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            monkeypatch.setattr(fcntl, "flock", flock)
            owner.release()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", release_first)
    assert not is_free(tmp_path)
    assert_free(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_reported_once(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(opened: object, operation: int) -> None:
        raise OSError(code, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = make(tmp_path)
    with caplog.at_level(logging.WARNING):
        lock.acquire()
        lock.acquire()
    lock.release()
    (warning,) = caplog.messages
    assert f"checkpoints in {tmp_path}: this file system cannot lock files (No locks available)" in warning


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file/below"):
        make(tmp_path / "file" / "below").acquire()
