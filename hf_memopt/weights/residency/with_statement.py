"""Whether a `with` statement is still being run: an interrupt may end one before its context sees it."""

import dis
import sys
from types import FrameType
from typing import NamedTuple


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
