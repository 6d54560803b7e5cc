"""A server with imported libraries that forks for each call; it runs no backward and uses no accelerator itself."""

import atexit
import importlib
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from patience import HANG_S

TESTS = Path(__file__).parent


class Call(NamedTuple):
    """A call in a process of its own: `function` is `"module:name"`, and JSON can hold `arguments`."""

    function: str
    arguments: Sequence[Any] = ()
    environ: Mapping[str, str] = {}


class Ended(NamedTuple):
    """Exit status of a call, 0 where it returned, with returned value, and output with errors."""

    status: int
    returned: Any
    output: str


class ForkServer:
    """A server with an `environ` from its start on; `preload` may name missing modules."""

    def __init__(self, preload: Sequence[str], environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *preload], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True
        )
        atexit.register(self.close)

    def run(self, calls: Sequence[Call]) -> list[Ended]:
        """Run calls beside each other, in the present folder. The first that fails ends the others."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            request = {"calls": calls, "path": sys.path, "folder": folder, "working_folder": os.getcwd()}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            statuses = json.loads(self._process.stdout.readline())
            return [_ended(Path(folder, str(number)), status) for number, status in enumerate(statuses)]

    def close(self) -> None:
        self._process.communicate()
        atexit.unregister(self.close)


def _ended(file: Path, status: int) -> Ended:
    returned = pickle.loads(file.with_suffix(".returned").read_bytes()) if status == 0 else None
    return Ended(status, returned, file.with_suffix(".output").read_text(errors="replace"))


def called(function: str, *arguments: Any) -> Any:
    """Call `"module:name"`."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def serve(preload: Sequence[str]) -> None:
    """Answer requests until their pipe is closed."""
    for name in preload:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        children = [_fork(request, number) for number in range(len(request["calls"]))]
        print(json.dumps(_statuses(children)), flush=True)


def _statuses(children: Sequence[int]) -> list[int]:
    """Return exit statuses by process number; once one has failed, the others are ended."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        child, waited = os.wait()
        statuses[child] = os.waitstatus_to_exitcode(waited)
        if statuses[child] != 0:
            for other in set(children) - statuses.keys():
                os.kill(other, signal.SIGKILL)
    return [statuses[child] for child in children]


def _fork(request: Mapping[str, Any], number: int) -> int:
    child = os.fork()
    if child == 0:
        _run(Call(*request["calls"][number]), request, Path(request["folder"], str(number)))
    return child


def _run(call: Call, request: Mapping[str, Any], file: Path) -> NoReturn:
    status = 1
    signal.alarm(HANG_S)  # ends a call that hangs
    try:
        output = os.open(file.with_suffix(".output"), os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ |= call.environ
        os.chdir(request["working_folder"])
        sys.path[:] = request["path"]
        returned = called(call.function, *call.arguments)
        file.with_suffix(".returned").write_bytes(pickle.dumps(returned))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # At once: while the interpreter shuts down, gloo's threads can abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1:])
