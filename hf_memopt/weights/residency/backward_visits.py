"""Visits that backward passes open and close, for the nodes that a module's call has left in the graph."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from hf_memopt.autograd_state import current_backward
from hf_memopt.uncompiled import uncompiled


class OpenVisits:
    """The visits that are open, each closed at the latest when the backward pass that opened it ends.

    Args:
        when_ended: called when no backward pass is left.

    Attributes:
        num_ended: backward passes that have opened visits and are over.
    """

    def __init__(self, when_ended: Callable[[], None]) -> None:
        self.num_ended = 0
        self._when_ended = when_ended
        self._by_pass: dict[int, set[BackwardVisit]] = {}
        # Of passes that have recorded a graph, which a later one runs, with `num_ended` after the first of these.
        self._kept: dict[BackwardVisit, int] = {}

    def expect_end(self) -> None:
        """Have the end of the present backward pass close what is left open."""
        number = current_backward()
        if number not in self._by_pass:
            self._by_pass[number] = set()
            Variable._execution_engine.queue_callback(partial(self._end, number))

    def add(self, visit: "BackwardVisit") -> None:
        self._by_pass[current_backward()].add(visit)

    def remove(self, visit: "BackwardVisit") -> None:
        for visits in self._by_pass.values():
            visits.discard(visit)
        self._kept.pop(visit, None)

    def keep(self, visit: "BackwardVisit") -> None:
        self.remove(visit)
        self._kept[visit] = self.num_ended + 1

    def close_all(self) -> bool:
        """Close those of failed passes, and those kept for a graph that was run; returns whether a pass has failed."""
        have_failed = bool(self._by_pass)
        for number in list(self._by_pass):
            self._end(number)
        for visit, num_ended in list(self._kept.items()):
            if self.num_ended > num_ended:
                visit.end()
        return have_failed

    def _end(self, number: int) -> None:
        for visit in list(self._by_pass.pop(number, ())):
            visit.close()
        self.num_ended += 1
        if not self._by_pass:
            self._when_ended()


class BackwardVisit:
    """The visit of one call's nodes, as often as a backward pass runs them."""

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None], others: OpenVisits) -> None:
        self._enter, self._leave, self._others = enter, leave, others
        self._is_open = False
        self._records_graph = False

    @uncompiled
    def open(self, *gradients: Any) -> None:
        self._others.expect_end()
        if not self._is_open:
            self._enter()
            self._is_open = True
            self._others.add(self)
        self._records_graph = torch.is_grad_enabled()

    @uncompiled
    def close(self, *gradients: Any) -> None:
        """Close it, unless the pass records a graph: nodes that nothing announces then go on to read the weights."""
        if self._is_open and self._records_graph:
            self._others.keep(self)
        elif self._is_open:
            self.end()

    def end(self) -> None:
        self._is_open = False
        self._others.remove(self)
        self._leave()
