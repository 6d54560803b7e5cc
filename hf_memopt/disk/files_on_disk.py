"""Files that get their names once they are whole and on disk, locks for one writer at a time, and digests."""

import errno
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import nn

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


def put_in_place(draft: Path, file: Path) -> None:
    """Give a file that has been written as `draft` the name `file`, in the same folder.

    A power failure leaves the old file or the new one: contents are on disk before the name, and then the name.
    """
    sync(draft)
    draft.replace(file)
    sync(file.parent)


def sync(path: Path) -> None:
    """Wait until a file's contents, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Make a draft folder that becomes `output` if all goes well, and disappears otherwise."""
    output.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        draft.chmod(0o755)
        yield draft
        draft.rename(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def not_written(target: Path, error: Exception, advice: str, needed_bytes: int = 0) -> OSError:
    """Return an error that names `target`, and says how many bytes its disk has free, followed by `advice`.

    Torch and safetensors tell less than the system told them, so an error without a number becomes "no space left" if
    the disk has not room for `needed_bytes`, and otherwise an input/output error.
    """
    folder = next(parent for parent in target.parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    cause, code = str(error).partition("\n")[0], getattr(error, "errno", None)
    if code is None:
        code = errno.ENOSPC if free < needed_bytes else errno.EIO
        cause = f"{os.strerror(code)} ({cause})"
    return OSError(code, f"{target} could not be written: {cause}; its disk has {free:,} bytes free{advice}")


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


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def files_sha256(files: Iterable[Path], root: Path) -> str:
    """Return one digest of several files: their names below `root` and their contents. Costs one read."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(root).as_posix()} {file.stat().st_size}\n".encode())
        digest.update(bytes.fromhex(sha256(file)))
    return digest.hexdigest()


def weights_sha256(module: nn.Module) -> str:
    """Return the digest of parameters and buffers: names, dtypes, shapes and bytes. Costs one copy to the host."""
    digest = hashlib.sha256()
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
