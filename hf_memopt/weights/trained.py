"""The update of weights that stream while they train: it visits weights and gradients, a few parameters at a time."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from hf_memopt.weights.gradients import Entered, Gradients
from hf_memopt.weights.residency.visiting import Visiting


@dataclass(eq=False)
class _Open:
    """A visit of an update, and the user of its storages."""

    parameters: Sequence[Tensor]
    entered: list[Entered] = field(default_factory=list)


class TrainedWeights:
    """Weights and gradients with a home, for `OffloadedOptimizer`.

    Attributes:
        at_once: parameters whose gradients came at once in the last pass of `in_backward`.
        writes_gradients: whether the optimizer writes gradients in its update.
    """

    def __init__(self, visiting: Visiting, gradients: Gradients) -> None:
        self._visiting, self._gradients = visiting, gradients
        self._open: _Open | None = None
        self.at_once: set[Tensor] = set()
        self.writes_gradients = False

    @contextmanager
    def update(self) -> Iterator[None]:
        """Enclose an update, or the rest of one. When it ends, weights and gradients are at home."""
        self.close()
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
        """Keep some parameters and their gradients on the device, as plain tensors."""
        with self._gradients.lock:
            self._open = _Open(parameters)
            try:
                self._visiting.enter_update(parameters, self._open)
                self._gradients.enter(parameters, self._open.entered)
                yield
            finally:
                self.close()

    def close(self) -> None:
        """End the visit that is open, of which an interrupt may have cut off the end."""
        if self._open is not None:
            with self._gradients.lock:
                self._gradients.leave(self._open.entered, self.writes_gradients)
                self._visiting.leave_update(self._open.parameters, self._open)
                self._open = None

    @contextmanager
    def in_backward(self, when_complete: Callable[[Tensor], bool]) -> Iterator[None]:
        """Call a function with parameters in a backward pass, each when its gradient is complete.

        That is known of those which got it at once in the last such pass: reentrant checkpointing's regions add to it.
        """
        gradients, at_once = self._gradients, self.at_once
        gradients.num_additions()

        def when_added(parameter: Tensor) -> bool:
            return parameter in at_once and when_complete(parameter)

        gradients.when_added = when_added
        try:
            yield
        finally:
            gradients.when_added = None
            self.at_once = {each for each, number in gradients.num_additions().items() if number == 1}

    def use_up(self, parameters: Iterable[Tensor]) -> None:
        """Give up the gradients of parameters that were updated in backward."""
        self._gradients.use_up(parameters)

    def fetch(self, parameters: Iterable[Tensor]) -> None:
        """Start bringing gradients that are needed next; weights are fetched in the order of the update before."""
        self._gradients.fetch(parameters)
