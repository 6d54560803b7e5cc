"""The command line of `hf-memopt` and of every recipe: a user's mistake is one line on standard error."""

import argparse
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from unittest.mock import patch

from hf_memopt.ranges import Range

TRACEBACK_FLAG = "--traceback"

# By name, so that nothing is imported for them.
_OF_LIBRARIES = {
    "datasets.exceptions.DatasetsError",
    "draccus.utils.DraccusException",
    "httpx.HTTPError",
    "huggingface_hub.errors.StrictDataclassError",
}
# The extras that a recipe or command needs if it finds no such module.
_EXTRAS = {
    "PIL": "fluxflow",
    "diffusers": "fluxflow",
    "jinja2": "report",
    "lerobot": "lerobot",
    "lpips": "fluxflow",
    "matplotlib": "report",
    "metaworld": "metaworld",
    "neuralop": "neuralop",
    "peft": "peft",
    "shtab": "completion",
    "torchvision": "fluxflow",
    "trl": "trl,peft",
}
# Characters of a message that are shown.
_MAX_LINE = 4000
_REMEDIES = {
    errno.EACCES: "name another place, or change its permissions",
    errno.EEXIST: "name another",
    errno.EISDIR: "name a file",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ENOENT: "check the path",
    errno.ENOSPC: "free some space, or name another place",
    errno.ENOTDIR: "a part of the path is a file; name a folder",
    errno.EPERM: "name another place, or change its permissions",
    errno.EROFS: "name a place that can be written to",
}


def one_line_errors(program: str, main: Callable[[list[str]], Any], arguments: Sequence[str] | None = None) -> int:
    """Run `main` and return its exit status; a user's mistake goes to standard error as one line and gives 2.

    So does training that diverged (FloatingPointError), which gives 1. `--traceback`, which `main` does not see, lets
    both escape; the line mentions it where another library found the mistake. Everything that is not known to come from
    bad input escapes in any case. Where `main` is the program's own, Ctrl-C ends it with a line and the status 130.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    passed_on = [argument for argument in given if argument != TRACEBACK_FLAG]
    if arguments is None and passed_on == given and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, partial(_end, program))
    try:
        status = main(passed_on)
    except Exception as error:
        line = None if passed_on != given else _line(error)
        if line is None:
            raise
        _say(program, line, error)
        return 1 if isinstance(error, FloatingPointError) else 2
    return status if isinstance(status, int) else 0


def _end(program: str, number: int, frame: FrameType | None) -> NoReturn:
    sys.stderr.write(f"{program}: interrupted\n")
    raise SystemExit(128 + number)


@contextmanager
def script_imports(program: str, name: str) -> Iterator[None]:
    """Import the parts of a script; if a library of an extra is missing, end the script as `one_line_errors` does.

    `name` is the script's `__name__`: a module that imports the script gets the ModuleNotFoundError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        line = _line(error)
        if name != "__main__" or TRACEBACK_FLAG in sys.argv or line is None:
            raise
        _say(program, line, error)
        sys.exit(2)


def _say(program: str, line: str, error: Exception) -> None:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = str(frame.f_globals["__name__"]).startswith(("hf_memopt", "__main__"))
    hint = "" if is_ours else f" ({TRACEBACK_FLAG} shows where)"
    rank = f"[rank {os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    # In one call, so that lines of several processes do not mix.
    sys.stderr.write(f"{rank}{program}: error: {_printable(line)}{hint}\n")


def _printable(line: str) -> str:
    """Escape control characters, which a terminal would obey, and cut a message at `_MAX_LINE` characters."""
    shown = line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}... ({len(line):,} characters)"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in shown)


def _line(error: Exception) -> str | None:
    if isinstance(error, ModuleNotFoundError) and not (error.name or "hf_memopt").startswith("hf_memopt"):
        module = str(error.name).partition(".")[0]
        extra = _EXTRAS.get(module)
        return f"{module} is not installed" + (f": pip install 'hf_memopt[{extra}]'" if extra else "; install it")
    if isinstance(error, OSError) and error.filename is not None and error.errno in _REMEDIES:
        return f"{str(error.filename)!r}: {error.strerror}; {_REMEDIES[error.errno]}"
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    if isinstance(error, ValueError | OSError | FloatingPointError) or names & _OF_LIBRARIES:
        return " ".join(str(error).split()) or type(error).__name__
    return None


class Parser(argparse.ArgumentParser):
    """Takes `-` and `_` in names of flags alike, and raises ValueError where argparse prints the usage and exits."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        cut = words.index("--") if "--" in words else len(words)  # others' words follow
        return super().parse_known_args([*map(self._as_added, words[:cut]), *words[cut:]], namespace)

    def _as_added(self, word: str) -> str:
        name, equals, value = word.partition("=")
        bare = name.removeprefix("--")
        spellings = {name} if bare == name else {name, "--" + bare.replace("_", "-"), "--" + bare.replace("-", "_")}
        known = spellings & self._option_string_actions.keys()
        return word if name in known or not known else known.pop() + equals + value

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists all options")


@contextmanager
def argparse_raising() -> Iterator[None]:
    """Make the parsers of other libraries raise ValueError, too."""
    with patch.object(argparse.ArgumentParser, "error", Parser.error):
        yield


def flag(default: Any, text: str, **options: Any) -> Any:
    """Return a field with its help text and `add_argument` options; a list becomes each instance's default anew."""
    metadata = {"help": text, **options}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def number(allowed: Range) -> Callable[[str], Any]:
    kind = int if allowed.whole else float

    def parse(text: str) -> float:
        value = kind(text)
        if complaint := allowed.complaint(value):
            raise argparse.ArgumentTypeError(f"{text} {complaint}")
        return value

    parse.__name__ = kind.__name__  # argparse's name for it in messages about text that is no number
    return parse


def numbers(allowed: Range) -> Callable[[str], list[Any]]:
    parse_one = number(allowed)

    def parse(text: str) -> list[Any]:
        return [parse_one(each) for each in text.split(",")]

    parse.__name__ = f"list of {parse_one.__name__}"
    return parse


def check_output_file(option: str, path: Path | None) -> None:
    """Raise ValueError for a file that cannot be written, before the work whose result it is for."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option}={str(path)!r} is a folder; name a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option}={str(path)!r}: there is no folder {str(path.parent)!r}; make it, or name another")
    _check_writable(option, path, path if path.exists() else path.parent)


def check_output_folder(option: str, path: Path | None) -> None:
    """Raise ValueError for a folder that cannot be made or written to, before the work whose result it is for."""
    if path is None:
        return
    there = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))
    if not there.is_dir():
        raise ValueError(f"{option}={str(path)!r}: {there} is a file; name a folder")
    path.is_dir()  # raises OSError for a name that is too long
    _check_writable(option, path, there)


def _check_writable(option: str, path: Path, there: Path) -> None:
    if not os.access(there, os.W_OK):
        raise ValueError(f"{option}={str(path)!r}: {there} cannot be written to; name another place")
