"""Device memory that saved activations hold, counted in the order in which the host gives memory out and takes it back.

That is the order in which a caching allocator counts too, so the figure does not depend on how far the device has come.
"""

from collections.abc import Callable

import torch

NO_BACKWARD = -1  # what torch calls the backward pass of a thread that is in none
# The number of the backward pass that this thread is in, `NO_BACKWARD` outside. torch's own functions: they are asked
# once or twice for every saved tensor.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
# Whether the backward pass that this thread is in leaves its graph to another one.
graph_is_retained: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


class Residency:
    """Bytes now and at most, of the storages above the offloader's threshold.

    A storage whose last use has begun stays counted until another autograd node takes its turn, since the node at work
    still reads it. Who gives memory up otherwise takes it out of `now_bytes`.
    """

    def __init__(self) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0
        self._ending_bytes = 0
        self._node: int | None = None

    def add(self, num_bytes: int) -> None:
        """Count memory that a storage has taken."""
        if self._ending_bytes:
            self.settle()
        self.now_bytes += num_bytes
        if self.now_bytes > self.peak_bytes:
            self.peak_bytes = self.now_bytes

    def remove_after_node(self, num_bytes: int) -> None:
        """Memory that the autograd node at work is the last to use."""
        self.settle()
        self._node = current_node()
        self._ending_bytes += num_bytes

    def settle(self) -> None:
        """Take out what ended with the last node, if another one is at work."""
        if self._ending_bytes and (self._node is None or current_node() != self._node):
            self.now_bytes -= self._ending_bytes
            self._ending_bytes = 0


def current_node() -> int | None:
    """The number of the autograd node that is being computed in this thread, None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return current_backward() != NO_BACKWARD
