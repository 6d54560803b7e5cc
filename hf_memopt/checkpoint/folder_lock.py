"""One process at a time writes a folder."""

from pathlib import Path
from weakref import WeakValueDictionary, finalize

from hf_memopt.disk.locks import WriterLock


class FolderLock:
    """The lock of a folder in this process: released when nothing refers to it any more. Get it from `lock_of`.

    Args:
        folder: holds the lock file `.lock` then; made when it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = WriterLock(folder / ".lock", str(folder), "choose another folder")
        finalize(self, self._lock.release)

    def acquire(self) -> None:
        """Take the lock; does nothing where this process has it.

        Raises:
            ValueError: another process writes there: says which, and since when.
            OSError: the folder cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()

    def release(self) -> None:
        """Let others have it now."""
        self._lock.release()


_locks: WeakValueDictionary[Path, FolderLock] = WeakValueDictionary()


def lock_of(folder: Path) -> FolderLock:
    """Return the same one for all that use a folder in this process."""
    folder = folder.resolve()
    return _locks.setdefault(folder, FolderLock(folder))
