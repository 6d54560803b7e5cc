"""Waits of tests for other processes, and their limit."""

import time
from collections.abc import Callable

# For hangs, not for slow steps: importing lerobot alone takes minutes where processes share two cores.
HANG_S = 1800


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)
