"""The update of weights that stream while they train: it visits weights and gradients, a few parameters at a time."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from hf_memopt.weights.gradients import Gradients
from hf_memopt.weights.residency.visiting import Pass, Visiting


class TrainedWeights:
    """Weights and gradients with a home, for `OffloadedOptimizer`."""

    def __init__(self, visiting: Visiting, gradients: Gradients) -> None:
        self._visiting, self._gradients = visiting, gradients
        self._pass: Pass | None = None

    @contextmanager
    def update(self) -> Iterator[None]:
        """Enclose an update, or the rest of one. When it ends, weights and gradients are at home."""
        self._gradients.settle()
        under_way, has_failed = self._visiting.begin("update"), True
        try:
            yield
            has_failed = False
        finally:
            self._visiting.end(under_way, has_failed, needs_backward=False)
        self._gradients.settle()

    @contextmanager
    def visit(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Have some parameters and their gradients on the device, as plain tensors."""
        user = object()
        with self._gradients.lock:
            visit = self._visiting.update(parameters, user)
            try:
                entered = self._gradients.enter(parameters)
                try:
                    yield
                finally:
                    self._gradients.leave(entered)
            finally:
                self._visiting.end_update(visit, user)

    def fetch(self, parameters: Iterable[Tensor]) -> None:
        """Start bringing gradients that are needed next; weights are fetched in the order of the update before."""
        self._gradients.fetch(parameters)
