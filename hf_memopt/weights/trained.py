"""The update of weights that stream while they train: it visits weights and gradients, a few parameters at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from hf_memopt.weights.gradients import Entered, Gradients
from hf_memopt.weights.residency.visiting import Visiting


class TrainedWeights:
    """Weights and gradients with a home, for `OffloadedOptimizer`.

    Attributes:
        at_once: parameters whose gradients came at once in the last pass of `in_backward`.
        writes_gradients: whether the optimizer writes gradients in its update.
    """

    def __init__(self, visiting: Visiting, gradients: Gradients) -> None:
        self._visiting, self.gradients = visiting, gradients
        # Of the visit that is open.
        self._parameters: Sequence[Tensor] = ()
        self._entered: list[Entered] = []
        self.at_once: set[Tensor] = set()
        self.writes_gradients = False

    @contextmanager
    def update(self) -> Iterator[None]:
        """Enclose an update, or the rest of one. When it ends, weights and gradients are at home."""
        self.close()
        self.gradients.settle()
        under_way, has_failed = self._visiting.begin("update"), True
        try:
            yield
            has_failed = False
        finally:
            self._visiting.end(under_way, has_failed, needs_backward=False)
        self.gradients.settle()

    @contextmanager
    def visit(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Keep some parameters and their gradients on the device, as plain tensors."""
        with self.gradients.lock:
            self._parameters = parameters
            try:
                self._visiting.enter_update(parameters, self)
                self.gradients.enter(parameters, self._entered)
                yield
            finally:
                self.close()

    def close(self) -> None:
        """End the visit that is open, of which an interrupt may have cut off the end."""
        with self.gradients.lock:
            self.gradients.leave(self._entered, self.writes_gradients)
            self._entered.clear()
            self._visiting.leave_update(self._parameters, self)
            self._parameters = ()

    @contextmanager
    def in_backward(self, when_complete: Callable[[Tensor], bool]) -> Iterator[None]:
        """Call a function with parameters in a backward pass, each when its gradient is complete.

        That is known of those which got it at once in the last such pass: reentrant checkpointing's regions add to it.
        """
        gradients, at_once = self.gradients, self.at_once
        gradients.num_additions()

        def when_added(parameter: Tensor) -> bool:
            return parameter in at_once and when_complete(parameter)

        gradients.when_added = when_added
        try:
            yield
        finally:
            gradients.when_added = None
            self.at_once = {each for each, number in gradients.num_additions().items() if number == 1}
