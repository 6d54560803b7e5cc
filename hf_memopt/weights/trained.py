"""The update of weights that stream while they train: it visits weights and gradients, a few parameters at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from hf_memopt.weights.gradients import Entered, Gradients
from hf_memopt.weights.residency.resident_set import Visit
from hf_memopt.weights.residency.visiting import Visiting


class TrainedWeights:
    """Weights and gradients with a home, for `OffloadedOptimizer`.

    Attributes:
        at_once: parameters whose gradients came at once in the last pass of `in_backward`, and which it read no more.
        writes_gradients: whether the optimizer writes gradients in its update.
    """

    def __init__(self, visiting: Visiting, gradients: Gradients) -> None:
        self._visiting, self.gradients = visiting, gradients
        # Of the visit that is open.
        self._visit: Visit = ()
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
            self._visit = self._visiting.visit_of_update(parameters)
            try:
                self._visiting.enter_update(self._visit, self)
                self.gradients.enter(parameters, self._entered)
                yield
            finally:
                self.close()

    def close(self) -> None:
        """End the visit that is open, of which an interrupt may have cut off the end."""
        with self.gradients.lock:
            self.gradients.leave(self._entered, self.writes_gradients)
            self._entered.clear()
            self._visiting.leave_update(self._visit, self)
            self._visit = ()

    @contextmanager
    def in_backward(self, when_complete: Callable[[Tensor], bool]) -> Iterator[None]:
        """Call a function with parameters in a backward pass, each when it is complete: it may be written then.

        That is known of those which were in the last such pass: reentrant checkpointing adds to gradients, and values
        may be needed later, as constants or to compute again. Where they are, in a pass of another kind, that raises.
        """
        visiting, at_once, gradients = self._visiting, self.at_once, self.gradients
        owners = visiting.visits_of_owners()
        # By the storages of complete gradients, whether the function has them.
        complete: dict[int, bool] = {}
        needed_later = set[int]()
        gradients.num_additions()

        def when_added(parameter: Tensor) -> bool:
            visit = visiting.visit_of([parameter])
            if visiting.is_used_but_in(owners[id(parameter)], visit):
                needed_later.update(visit)
            is_free = parameter in at_once and needed_later.isdisjoint(visit) and when_complete(parameter)
            complete.update(dict.fromkeys(visit, is_free))
            return is_free

        def when_entered(visit: Visit) -> None:
            for number in visit:
                if complete.get(number):
                    raise RuntimeError(
                        f"weight {visiting.names[number]!r} is needed again in a backward pass that has updated it, as "
                        "no earlier one has done; leave out update_in_backward(), or max_grad_norm=0 of a Trainer"
                    )
            needed_later.update(complete.keys() & set(visit))

        gradients.when_added, visiting.when_entered = when_added, when_entered
        try:
            yield
        finally:
            gradients.when_added = visiting.when_entered = None
            self.at_once = {
                each
                for each, number in gradients.num_additions().items()
                if number == 1 and needed_later.isdisjoint(visiting.visit_of([each]))
            }
