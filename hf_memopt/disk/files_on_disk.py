"""Files that get their names once they are whole and on disk, and errors that name the file that was not written."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
