"""SIGTERM and SIGINT as a wish to stop, which the training loop grants where it can save."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignals:
    """Notes SIGTERM and SIGINT while it listens.

    Attributes:
        received: number of the first signal; 0 where there was none.
    """

    def __init__(self) -> None:
        self.received = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals inside; the handlers from before are back afterwards. Only for the main thread."""
        self.received = 0
        previous = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number
