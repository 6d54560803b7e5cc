"""One process at a time writes a folder or a file, and a second one is told at once who does."""

import atexit
import errno
import fcntl
import json
import logging
import os
import socket
from datetime import UTC, datetime, timedelta
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class WriterLock:
    """A lock file that names its owner, under `flock`: the kernel releases the lock of a dead process.

    Use it in a `with` statement, or call `acquire` and `release`. The end of the interpreter releases it as well, and
    forked children do not hold it. Where the file system cannot lock, a warning says so and nothing is locked.

    Args:
        file: the lock file, in an existing folder. It disappears when the lock is released.
        what: the files written under this lock, for messages: `"checkpoints in runs/a"`.
        advice: the remedy other than waiting, for messages: `"name another output folder"`.
    """

    def __init__(self, file: Path, what: str, advice: str) -> None:
        self._file, self._what, self._advice = file, what, advice
        self._opened: FileIO | None = None

    def acquire(self) -> None:
        """Take the lock. A dead process does not stand in the way; that of another machine is named in a warning.

        Raises:
            ValueError: another process holds it: says which, where and since when.
            OSError: the lock file cannot be written.
        """
        while self._opened is None:
            opened = FileIO(self._file, "a+")
            try:
                self._lock(opened)
                if _is_at(opened, self._file):  # else its owner has just removed it
                    self._sign(opened)
                    self._opened = opened
                    _held.add(self)
            finally:
                if self._opened is None:
                    opened.close()

    def release(self) -> None:
        """Let others have it; does nothing where it is not held."""
        if self._opened is not None:
            try:
                self._file.unlink(missing_ok=True)
            finally:
                self.forget()
                _held.discard(self)

    def forget(self) -> None:
        """Close the lock file, without a word to others. For the child of a fork, whose parent keeps the lock."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def __enter__(self) -> "WriterLock":
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _lock(self, opened: FileIO) -> None:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _read_owner(opened)
            raise ValueError(
                f"{self._what}: {owner.text if owner else 'another process'} is writing there. Wait for it or stop it, "
                f"or {self._advice}"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                "%s: this file system cannot lock files (%s); nothing will notice a second process that writes there",
                self._what,
                error.strerror,
            )

    def _sign(self, opened: FileIO) -> None:
        before = _read_owner(opened)
        if before and before.host != socket.gethostname():
            # A job that is killed and queued again finds this. But on some network file systems a lock holds within one
            # machine only, and then the owner may be alive.
            logger.warning(
                "%s: %s left its lock there, and this process takes it over. If that process still runs, stop it or %s",
                self._what,
                before.text,
                self._advice,
            )
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now().isoformat()}
        try:
            opened.truncate(0)
            opened.write(json.dumps(owner).encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._file)) from error


class _Owner(NamedTuple):
    host: str
    text: str


def _read_owner(opened: FileIO) -> _Owner | None:
    """Return who has signed a lock file; None where it is unsigned or cannot be read."""
    opened.seek(0)
    try:
        signed = json.loads(opened.read())
        since = datetime.fromisoformat(signed["since"])
        age = max(_now() - since, timedelta(0))
        return _Owner(signed["host"], f"process {signed['pid']} on {signed['host']}, since {since} ({age} ago),")
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _is_at(opened: FileIO, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened.fileno()), file.stat())
    except FileNotFoundError:
        return False


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


_held: set[WriterLock] = set()


def _forget_all() -> None:
    while _held:
        _held.pop().forget()


@atexit.register
def _release_all() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_all)
