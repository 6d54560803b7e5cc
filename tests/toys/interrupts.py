"""Interrupts between any two instructions of the package at which Python looks for signals."""

import dis
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch

# After these Python looks for signals.
_LOOKS = {"RESUME", "JUMP_BACKWARD", "CALL", "CALL_FUNCTION_EX"}


class Interrupter:
    """Calls functions, and raises KeyboardInterrupt in the package's code at the `number`-th place where a signal may.

    Args:
        paths: parts of the names of the source files to interrupt.

    Attributes:
        count: places that the last call has passed.
        place: file, line and function of the interrupt, for messages.
    """

    def __init__(self, *paths: str) -> None:
        self._paths = paths
        self._number: int | None = None
        self.count, self.place = 0, ""

    def call(self, function: Callable[[], Any], number: int | None = None) -> None:
        self.count, self.place, self._number = 0, "", number
        sys._getframe().f_trace_opcodes = True  # else Python 3.12 calls no tracer for instructions
        sys.settrace(self._enter)
        try:
            with suppress(KeyboardInterrupt):
                function()
        finally:
            sys.settrace(None)
        leave_contexts_of_torch()

    def at_places(self, function: Callable[[], Any], num_places: int, num_warm_ups: int = 3) -> Iterator[str]:
        """Interrupt calls of a function at random places, after calls without interrupts; yields each place."""
        for _ in range(num_warm_ups):
            self.call(function)
        for number in random.Random(0).choices(range(1, self.count + 1), k=num_places):
            self.call(function, number)
            yield self.place

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not any(path in frame.f_code.co_filename for path in self._paths):
            return None
        if frame.f_code.co_name == "__del__":  # where Python ignores errors, and pytest fails at the warning
            return None
        frame.f_trace_opcodes = True
        return self._trace

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _places(frame.f_code):
            self.count += 1
            if self.count == self._number:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
                raise KeyboardInterrupt
        return self._trace


@cache
def _places(code: CodeType) -> frozenset[int]:
    """Return the instructions before which a signal may interrupt, without those that another handler covers."""
    listing = dis.Bytecode(code)
    entries: Any = listing.exception_entries  # type: ignore[attr-defined]

    def handler(place: int) -> int:
        return next((each.target for each in entries if each.start <= place < each.end), -1)

    found = [*listing]
    return frozenset(
        after.offset
        for before, after in itertools.pairwise(found)
        if before.opname in _LOOKS and handler(before.offset) == handler(after.offset)
    )


def leave_contexts_of_torch() -> None:
    """Leave contexts of torch itself that an interrupt between their entry and the with statement has left entered."""
    torch.set_grad_enabled(True)
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for _ in range(torch.autocast_increment_nesting()):  # checkpointing enters autocast to compute a region again
        torch.autocast_decrement_nesting()
