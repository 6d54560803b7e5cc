"""Commands that end with the training that they have started, and training that ends with its command."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import psutil

# The variable that has the number of the command's process, for the scripts that it launches.
COMMAND = "HF_MEMOPT_COMMAND"
# Seconds in which training may save a checkpoint and end, before it is killed.
_GRACE_S = 60
_WATCH_EVERY_S = 0.5


def end_tree_on_signals() -> None:
    """Install handlers: SIGTERM, SIGHUP and Ctrl-C end the children first, then this process with status 128 + signal.

    The children get the signal, unless they have got Ctrl-C from their terminal. A second one kills them.
    """
    for name in ("SIGTERM", "SIGHUP", "SIGINT"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end_tree)


def _end_tree(number: int, frame: FrameType | None) -> NoReturn:
    import psutil

    def ends_with_parent(process: psutil.Process) -> bool:
        """Return whether this is Python's own process for shared memory, which ignores signals."""
        try:
            return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
        except psutil.Error:  # it has ended
            return True

    tree = [each for each in psutil.Process().children(recursive=True) if not ends_with_parent(each)]

    for each in (signal.SIGTERM, signal.SIGINT, number):
        signal.signal(each, lambda *_: _send(tree, signal.SIGKILL))
    if number != signal.SIGINT or not _is_in_foreground():
        _send(tree, number)
    psutil.wait_procs(tree, timeout=None if number == signal.SIGINT else _GRACE_S)
    _send(tree, signal.SIGKILL)
    raise SystemExit(128 + number)


def _send(processes: "Iterable[psutil.Process]", number: int) -> None:
    import psutil

    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def _is_in_foreground() -> bool:
    """Return whether a terminal sends Ctrl-C to this process and its children alike."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except (AttributeError, OSError):  # no terminal, or another system
        return False


def end_with_command(removing: Path | None = None) -> None:
    """End this process when the command named by `COMMAND` has ended, if it is set, and remove the command's folder."""
    if COMMAND in os.environ:
        end_with(int(os.environ[COMMAND]), removing)


def begin_child(parent: int) -> None:
    """Set up a worker process: it ends when its parent has ended, and at signals without a traceback."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    end_with(parent)


def end_with(process: int, removing: Path | None = None) -> None:
    """End this process, and those that it has started, by SIGTERM within a second after another one has ended.

    Amid work too, or blocked on a pipe. Where SIGTERM does not end it, as in a script that saves a checkpoint then, it
    is killed a minute later.
    """
    threading.Thread(target=_end_with, args=(process, removing), daemon=True).start()


def _end_with(process: int, removing: Path | None) -> None:
    import psutil

    with suppress(psutil.NoSuchProcess):
        other = psutil.Process(process)
        while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_WATCH_EVERY_S)
    if removing is not None:
        shutil.rmtree(removing, ignore_errors=True)
    _send([*psutil.Process().children(recursive=True), psutil.Process()], signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)
