"""Limits for the memory of one process, which another process makes: a control group, or `RLIMIT_DATA`.

A control group of the child's own ends it when memory in use passes the limit. Memory that the system can take back,
such as pages of files, counts and is taken back before. Making one needs rights: those of root, or a group that systemd
has left to the user.

`RLIMIT_DATA` needs no rights. Private writable memory counts as soon as it is reserved, touched or not, and an
allocation past the limit fails: a MemoryError, or an error of torch's allocator. Shared mappings do not count.
"""

import errno
import itertools
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hf_memopt.transfer.host_memory import CGROUPS, MEMBERSHIP

# Writes its process id into a file, which moves it into the group, and becomes the command.
_ENTER = ["sh", "-c", 'echo $$ > "$0" && exec "$@"']


class _Files(NamedTuple):
    limit: str
    swap: str  # missing where the system does not count swap
    swap_follows_limit: bool  # as a limit of memory and swap together, or 0 for none at all
    kills: str


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", True, "memory.oom_control")
_VERSION_2 = _Files("memory.max", "memory.swap.max", False, "memory.events")


class ControlGroup:
    """A control group for one process, without swap, and without effect until its limit is `set`."""

    _numbers = itertools.count()

    name = "control group"
    # The field of `Sample` that the limit is compared with, but for caches and the kernel's own memory.
    counted = "anonymous_bytes"

    def __init__(self, folder: Path, files: _Files) -> None:
        self.folder, self._files = folder, files

    @classmethod
    def make(cls, root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> "ControlGroup | None":
        """Make a group and move nothing into it; return None where this process may not.

        The group is a child of this process's own. Version 2 gives children no limits while their parent holds
        processes itself, and then it is a sibling.
        """
        for parent, files in _own_groups(root, membership):
            folder = parent / f"hf_memopt-{os.getpid()}-{next(cls._numbers)}"
            with suppress(OSError):
                folder.mkdir()
                if os.access(folder / files.limit, os.W_OK) and os.access(parent / "cgroup.procs", os.W_OK):
                    return cls(folder, files)
                folder.rmdir()
        return None

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that starts `command` where the limit reaches it."""
        return [*_ENTER, str(self.folder / "cgroup.procs"), *command]

    def set(self, process: int, num_bytes: int) -> None:
        """Limit the process, by its id, from now on; a ValueError if it uses more already."""
        try:
            (self.folder / self._files.limit).write_text(str(num_bytes))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise ValueError(f"num_bytes={num_bytes}: process {process} uses more already; allow more") from error
        swap = self.folder / self._files.swap
        if swap.exists():
            swap.write_text(str(num_bytes) if self._files.swap_follows_limit else "0")

    def num_kills(self) -> int:
        """Return how many processes the system has ended at this limit."""
        fields = dict(line.split() for line in (self.folder / self._files.kills).read_text().splitlines())
        return int(fields["oom_kill"])

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        self.folder.rmdir()


def _own_groups(root: Path, membership: Path) -> Iterator[tuple[Path, _Files]]:
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/"), _VERSION_1
        elif not controllers:
            own = root / path.lstrip("/")
            yield own, _VERSION_2
            if own != root:
                yield own.parent, _VERSION_2


class DataLimit:
    """The system's limit of private writable memory, `RLIMIT_DATA`, with the attributes of a `ControlGroup`."""

    name = "RLIMIT_DATA"
    counted = "private_bytes"

    def command(self, command: Sequence[str]) -> list[str]:
        return list(command)

    def set(self, process: int, num_bytes: int) -> None:
        resource.prlimit(process, resource.RLIMIT_DATA, (num_bytes, num_bytes))

    def num_kills(self) -> int:
        return 0


MemoryLimit = ControlGroup | DataLimit
KINDS = ("auto", "group", "data")


@contextmanager
def memory_limit(kind: str = "auto") -> Iterator[MemoryLimit]:
    """Make a limit for one process: "group", "data", or "auto", which is a group where one can be made."""
    if sys.platform != "linux":
        raise OSError(f"only Linux limits the memory of a single process, and this is {sys.platform}: nothing to show")
    group = None if kind == "data" else ControlGroup.make()
    if group is not None:
        try:
            yield group
        finally:
            group.remove()
    elif kind == "group":
        raise OSError("limit='group': this process may not make a control group with a memory limit; use 'data'")
    else:
        yield DataLimit()
