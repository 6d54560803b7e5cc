"""Work in a process of its own, which leaves nothing behind in this one."""

import multiprocessing
import pickle
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch


class IsolatedError(RuntimeError):
    """A function failed in its process; the message ends with the traceback there."""


def run_isolated[Result](function: Callable[[], Result]) -> Result:
    """`function()` in a forked process, which inherits everything that was imported and defined.

    Nothing is pickled on the way in, so `function` may be a closure; its result must be picklable.

    Raises:
        ValueError: `function` raised it: the same error, whose note holds the traceback.
        IsolatedError: it raised anything else, or its process was killed.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(function, sender), daemon=True)
    with warnings.catch_warnings():
        # Threads of this process do not exist in the forked one. As in torch's DataLoader workers, that is safe for a
        # process which runs torch on one thread and leaves the accelerator alone.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        process.start()
    sender.close()
    try:
        result, error, trace = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join()
        raise IsolatedError(f"the simulation's process died with exit code {process.exitcode}") from None
    finally:
        receiver.close()
    process.join()
    if isinstance(error, ValueError):
        error.add_note(trace)
        raise error
    if error is not None:
        raise IsolatedError(f"{type(error).__name__}: {error}\n\n{trace}")
    return result  # type: ignore[no-any-return]


def _child(function: Callable[[], object], sender: Connection) -> None:
    torch.set_num_threads(1)
    result, error, trace = None, None, ""
    try:
        result = function()
    except Exception as caught:  # handed over to the parent, which raises it
        error, trace = caught, traceback.format_exc()
    sender.send_bytes(_pickled(result, error, trace))
    sender.close()


def _pickled(result: object, error: Exception | None, trace: str) -> bytes:
    try:
        return pickle.dumps((result, error, trace))
    except Exception as unpicklable:  # an error that cannot travel is reported by its text
        return pickle.dumps((None, RuntimeError(f"{error or unpicklable}"), trace or traceback.format_exc()))
