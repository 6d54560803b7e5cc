"""Visits that forward and backward passes have open, each closed at the latest when its pass is over.

A pass ends in many ways: an interrupt leaves no time for hooks, and torch tells nobody that a backward pass has failed.
So each visit is noted before it is entered, under the pass that it is part of. A visit by a `with` statement has that
statement noted.
"""

import dis
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable

from hf_memopt.autograd_state import NO_BACKWARD, current_backward, graph_is_retained
from hf_memopt.uncompiled import uncompiled


class OpenVisits:
    """The visits that are open, by the pass that opened them: a backward pass, or else the thread's present one.

    Args:
        when_ended: called when a backward pass has ended and no other is under way.

    Attributes:
        num_ended: backward passes that have opened visits and are over.
    """

    def __init__(self, when_ended: Callable[[], None]) -> None:
        self.num_ended = 0
        self._when_ended = when_ended
        self._calls: dict[int, list[Any]] = defaultdict(list)
        self._backward: dict[int, dict[BackwardVisit, None]] = {}
        # The thread of a backward pass, and a function that torch's engine holds until it has called it at the end.
        self._alive: dict[int, tuple[int, weakref.ref[Callable[[], None]]]] = {}
        # Of passes that have recorded a graph, which a later one runs, with `num_ended` after the first of these.
        self._kept: dict[BackwardVisit, int] = {}

    @property
    def calls(self) -> list[Any]:
        """Return the calls that the present pass is in, the innermost last."""
        number = current_backward()
        return self._calls[-threading.get_ident() if number == NO_BACKWARD else number]

    @property
    def threads(self) -> set[int]:
        """Return the threads that are in calls, or run backward passes."""
        in_calls = {-number for number, calls in list(self._calls.items()) if calls and number < 0}
        return in_calls | {thread for thread, ending in list(self._alive.values()) if ending() is not None}

    def of_present_pass(self) -> list[Any]:
        """Return the calls that the present pass is in, and the visits that it has open as a backward pass."""
        return [*self.calls, *self._backward.get(current_backward(), ())]

    def expect_end(self) -> "dict[BackwardVisit, None]":
        """Return the open visits of the present backward pass, whose end closes them."""
        number = current_backward()
        if number not in self._backward:
            end_backward = weakref.WeakMethod(self.end_backward)

            def end() -> None:
                if (found := end_backward()) is not None:
                    found(number)

            self._backward[number], self._alive[number] = {}, (threading.get_ident(), weakref.ref(end))
            Variable._execution_engine.queue_callback(end)
        return self._backward[number]

    def discard(self, visit: "BackwardVisit") -> None:
        for visits in list(self._backward.values()):
            visits.pop(visit, None)
        self._kept.pop(visit, None)

    def keep(self, visit: "BackwardVisit") -> None:
        """Keep a visit of a backward pass open, for a graph that a later one runs."""
        self.discard(visit)
        self._kept[visit] = self.num_ended + 1

    def is_kept(self, visit: "BackwardVisit") -> bool:
        return visit in self._kept

    def close_calls(self) -> bool:
        """End the calls that an interrupt or an error has left on this thread; returns whether there were any."""
        return self._end_calls(-threading.get_ident())

    def close_old(self, is_held: Callable[[int], bool]) -> bool:
        """Close what failed passes have left, and visits kept for a graph that was run or is gone: none `is_held`.

        Returns whether a pass has failed.
        """
        have_failed = self.close_calls()
        for number, (_, ending) in list(self._alive.items()):
            if ending() is None:
                self.end_backward(number)
                have_failed = True
        for visit, num_ended in list(self._kept.items()):
            if self.num_ended > num_ended or not any(map(is_held, visit.visit)):
                visit.end()
        return have_failed

    def end_backward(self, number: int) -> None:
        self._end_calls(number)
        for visit in list(self._backward.get(number, ())):
            visit.close()
        self._backward.pop(number, None)
        self._alive.pop(number, None)
        self.num_ended += 1
        if not self._backward:
            for other, calls in list(self._calls.items()):
                if other >= 0 and not calls:
                    del self._calls[other]
            self._when_ended()

    def _end_calls(self, number: int) -> bool:
        calls = self._calls.get(number, [])
        had_calls = bool(calls)
        while calls:
            calls[-1].end()
            calls.pop()
        self._calls.pop(number, None)
        return had_calls


class BackwardVisit:
    """The visit of one call's nodes, as often as a backward pass runs them."""

    def __init__(
        self, visit: Iterable[int], enter: Callable[[object], None], leave: Callable[[object], None], others: OpenVisits
    ) -> None:
        self.visit = visit
        self._enter, self._leave, self._others = enter, leave, others
        self._is_open = False
        self._records_graph = False
        self._num_nodes = 0
        # Of those after which it closes, the ones that have not run since it was opened.
        self._waiting: set[int] = set()

    @uncompiled
    def open(self, *gradients: Any) -> None:
        visits = self._others.expect_end()
        if self not in visits:
            visits[self] = None
            self._waiting = set(range(self._num_nodes))
        if not self._is_open:
            self._is_open = True
            self._enter(self)
        self._records_graph = torch.is_grad_enabled()

    @uncompiled
    def close(self, *gradients: Any) -> None:
        """End it, unless the pass records a graph, whose nodes nothing announces, or leaves one to another pass."""
        if self._is_open and (self._records_graph or (self._others.is_kept(self) and graph_is_retained())):
            self._others.keep(self)
        elif self._is_open:
            self.end()

    def close_after(self, nodes: Sequence[Any]) -> None:
        """Close it when all of some nodes have run."""
        self._num_nodes = len(nodes)
        for number, node in enumerate(nodes):
            node.register_hook(partial(self._node_has_run, number))

    @uncompiled
    def _node_has_run(self, number: int, *gradients: Any) -> None:
        self._waiting.discard(number)
        if not self._waiting:
            self.close()

    def end(self) -> None:
        """Leave the storages; once more does nothing."""
        if self._is_open:
            self._leave(self)
            self._is_open = False
        self._others.discard(self)


class WithStatement(NamedTuple):
    """The statement of a frame that has entered a context, or the call that has, such as `ExitStack.enter_context`."""

    frame: FrameType
    instruction: int

    @classmethod
    def of_caller(cls) -> "WithStatement":
        """Return the one that enters the context of the calling generator (`contextlib.contextmanager`)."""
        frame = sys._getframe(3)
        return cls(frame, frame.f_lasti)

    def may_be_running(self) -> bool:
        """Return False if the frame has left the statement's block. What a call has entered may go on after it."""
        code = self.frame.f_code
        if code.co_code[self.instruction] != dis.opmap.get("BEFORE_WITH"):
            return True
        entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
        handler = min((each for each in entries if each.start > self.instruction), key=lambda each: each.start).target
        # The handler of what runs now, the handler of that one, and so on, as an error would go through them.
        place = self.frame.f_lasti
        for _ in entries:
            place = next((each.target for each in entries if each.start <= place < each.end), -1)
            if place == handler:
                return True
        return False
