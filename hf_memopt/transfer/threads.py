"""Threads that read and write files, and stay usable after an interrupt at any moment."""

import _thread
import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue


class Call[T]:
    """A call that another thread makes, once."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._is_taken = threading.Lock()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def __call__(self) -> None:
        if not self._is_taken.acquire(blocking=False):
            return
        call, under_way = self._call, self._under_way
        del self._call  # with the memory that it moves
        try:
            self._result = call()
        except BaseException as error:  # raised to those who wait
            self._error = error
            del self  # the error's traceback has this frame
        finally:
            under_way.release()

    def done(self) -> bool:
        return not self._under_way.locked()

    def wait(self) -> None:
        with self._under_way:
            pass

    def exception(self) -> BaseException | None:
        self.wait()
        return self._error

    def result(self) -> T:
        if (error := self.exception()) is not None:
            raise error
        return self._result  # type: ignore[return-value]


class Threads:
    """A few threads that make calls, until this object is gone; the process ends after the calls that are left.

    `concurrent.futures` takes its locks in Python, so that Ctrl-C can come between taking one and the note that it has
    to be released; the next call would wait forever. The locks and the queue here are taken in C.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads, self._num_started = num_threads, 0
        self._calls: SimpleQueue[Call[object] | None] = SimpleQueue()
        self._under_way: dict[Call[object], None] = {}
        weakref.finalize(self, self._calls.put, None).atexit = False
        _all_threads.add(self)

    def submit(self, call: Call[object]) -> None:
        """Queue a call for the next free thread; raises RuntimeError if a thread cannot be started."""
        if self._num_started < self._num_threads:
            _thread.start_new_thread(_make_calls, (self._calls, self._under_way))
            self._num_started += 1
        self._under_way[call] = None
        self._calls.put(call)

    def settle(self) -> None:
        """Wait for all calls, those that an interrupt has cut off from their callers too."""
        for call in tuple(self._under_way):
            self.submit(call)  # the interrupt may have come before the first time
            call.wait()

    def finish(self) -> None:
        """Wait until all calls are made, and the memory that they moved is free."""
        all_idle = threading.Barrier(self._num_started + 1)
        for _ in range(self._num_started):
            self._calls.put(Call(all_idle.wait))
        all_idle.wait()


def _make_calls(calls: "SimpleQueue[Call[object] | None]", under_way: dict[Call[object], None]) -> None:
    while (call := calls.get()) is not None:
        call()
        under_way.pop(call, None)
        del call  # with the memory that it moves
    calls.put(None)  # for the next thread


_all_threads: "weakref.WeakSet[Threads]" = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_all_threads.clear)


@atexit.register
def _finish_all() -> None:
    # A thread that frees a tensor while the interpreter ends aborts the process.
    for threads in tuple(_all_threads):
        threads.finish()
