"""Work in a process of its own, which leaves nothing behind in this one, and does not outlive it."""

import gc
import importlib
import itertools
import logging
import multiprocessing
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import cast

import torch

from hf_memopt.process_trees import begin_child

# torch's engine in a child of a process whose threads for devices have started.
_FORKED_TOO_LATE = "autograd's threading in combination with fork"
# torch about a tensor of 2^63 bytes or numbers, or more.
TOO_LARGE = ("Storage size calculation overflowed", "numel: integer multiplication overflow")


def is_too_large(error: BaseException) -> bool:
    """Return whether torch refuses a tensor that no memory could hold."""
    return any(words in str(error) for words in TOO_LARGE)


class IsolatedError(RuntimeError):
    """A function failed in its process; the message ends with the traceback there."""


def run_isolated[Result](function: Callable[[], Result]) -> Result:
    """Run `function()` in a forked process; it may be a closure, but its result must be picklable.

    When this process dies, however it dies, that one ends within a second.

    Raises:
        ValueError: `function` raised it (its note holds the traceback), or a tensor was too large.
        IsolatedError: it raised anything else, or its process was killed.
    """
    return _Isolated(function).result()


def run_all_isolated[Result](functions: Iterable[Callable[[], Result]], num_workers: int) -> Iterator[Result]:
    """Yield the results of many functions, `num_workers` at a time, in the order in which they end; an error ends all.

    Each is taken from the iterable when there is room for it, so that it can depend on earlier results.
    """
    waiting = iter(functions)
    running: dict[Connection, _Isolated[Result]] = {}
    try:
        while True:
            for function in itertools.islice(waiting, num_workers - len(running)):
                isolated = _Isolated(function)
                running[isolated.receiver] = isolated
            if not running:
                return
            for receiver in wait(list(running)):
                yield running.pop(cast(Connection, receiver)).result()
    finally:
        for isolated in running.values():
            isolated.stop()


class _Isolated[Result]:
    def __init__(self, function: Callable[[], Result]) -> None:
        # Fake tensors would import it, for a second in each child.
        importlib.import_module("torch._dynamo")
        context = multiprocessing.get_context("fork")
        self.receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_child, args=(function, self.receiver, sender, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            # As in torch's DataLoader workers, that is safe for a process that runs torch on one thread and leaves the
            # accelerator alone.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            self._process.start()
        sender.close()

    def result(self) -> Result:
        try:
            result, error, trace = pickle.loads(self.receiver.recv_bytes())
        except EOFError:
            self._process.join()
            raise IsolatedError(f"the simulation's process died with exit code {self._process.exitcode}") from None
        finally:
            self.receiver.close()
        self._process.join()
        if error is None:
            return result  # type: ignore[no-any-return]
        if isinstance(error, ValueError):
            error.add_note(trace)
            raise error
        if _FORKED_TOO_LATE in str(error):
            raise ValueError(
                "autograd has started its threads for devices in this process, after which it does not survive a fork: "
                "backward has run on an accelerator, or, on a machine without one, after torch.compile or a "
                "FakeTensorMode; estimate and plan before the first backward, or in a process of their own"
            )
        if is_too_large(error):
            raise ValueError(
                f"a tensor of this step is larger than any memory ({error}); use smaller sizes or a smaller batch"
            )
        raise IsolatedError(f"{type(error).__name__}: {error}\n\n{trace}")

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.receiver.close()


def _child(function: Callable[[], object], receiver: Connection, sender: Connection, parent: int) -> None:
    receiver.close()  # or the pipe would have a reader for ever
    begin_child(parent)
    torch.set_num_threads(1)
    gc.freeze()  # imported objects stay, and take a third of a second to look through each time
    gc.enable()  # cycles of tensors die in a simulation too, also where the command line has switched collection off
    logging.disable(logging.CRITICAL)  # results and exceptions carry all that matters
    result, error, trace = None, None, ""
    try:
        result = function()
    except Exception as caught:
        error, trace = caught, traceback.format_exc()
    sender.send_bytes(_pickled(result, error, trace))
    sender.close()


def _pickled(result: object, error: Exception | None, trace: str) -> bytes:
    try:
        return pickle.dumps((result, error, trace))
    except Exception as unpicklable:  # an error that cannot travel is reported by its text
        return pickle.dumps((None, RuntimeError(f"{error or unpicklable}"), trace or traceback.format_exc()))
