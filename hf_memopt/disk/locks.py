"""One process at a time writes a folder or a file; a second one is refused at once, or waits."""

import errno
import functools
import logging
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class WriterLock:
    """A lock file under `flock`: the kernel releases the lock of a dead process, and forked children do not hold it.

    All locks of one file in a process are one, released with the last of them, if not before.

    Args:
        file: the lock file; its folder is made when it is needed. `release` removes it.
        what: the files written under this lock, for messages: `"checkpoints in runs/a"`.
        advice: the remedy other than waiting, for messages: `"name another output folder"`.
    """

    def __init__(self, file: Path, what: str, advice: str) -> None:
        self._file, self._what, self._advice = file.absolute(), what, advice
        # Where `flock` is missing, filelock would fall back to files that outlive a killed process.
        self._lock = FileLock(self._file, blocking=False, thread_local=False, is_singleton=True, fallback_to_soft=False)

    def acquire(self) -> None:
        """Take the lock, unless this process has it; ValueError if another has it, a warning without locks."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._lock.is_locked:
            return
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(
                f"{self._what}: another process is writing there. Wait for it or stop it, or {self._advice}"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _warn_once(self._what, error.strerror)

    def release(self) -> None:
        if self._lock.is_locked:
            # A process that has opened the file meanwhile gets no lock on it: filelock sees that it has lost its name.
            self._file.unlink(missing_ok=True)
            self._lock.release(force=True)


def lock_of(folder: Path) -> WriterLock:
    return WriterLock(folder.resolve() / ".lock", str(folder), "choose another folder")


def waiting_lock(file: Path) -> FileLock:
    """Return a lock as a context manager, for which other processes wait."""
    return FileLock(file, fallback_to_soft=False)


@functools.cache
def _warn_once(what: str, reason: str) -> None:
    logger.warning(
        "%s: this file system cannot lock files (%s); nothing will notice a second process that writes there",
        what,
        reason,
    )
