"""Stops a recipe before an update whose loss or gradient is not finite."""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from hf_memopt.memory.ranks import gather_from_ranks
from hf_memopt.training import NonFiniteGradientError
from hf_memopt.training.finite_check import (
    LOSS,
    Findings,
    GradientWatch,
    finite_on_all_ranks,
    largest_magnitude,
    scaler_takes_care,
)


class FiniteCheck:
    """The losses and gradients of one update, looked at before the optimizer sees them.

    Cost: one reduction over each gradient in every micro-batch and one over all of them per update, an all-reduce of
    4 bytes, and one wait of the host for the device per update.

    Model and optimizer are as accelerate prepared them; `number` returns the number of the coming update, from 1.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any, number: Callable[[], int]) -> None:
        self._accelerator, self._model, self._optimizer = accelerator, accelerator.unwrap_model(model), optimizer
        self._number = number
        self._watch = GradientWatch(self._model)
        self.begin_update()

    def begin_update(self) -> None:
        """Forget all gradients so far; only needed where others than the update's own have come meanwhile."""
        self._losses: list[Tensor] = []
        self._watch.begin_step()

    def end_micro_batch(self, loss: Tensor) -> None:
        """Take note of a micro-batch's loss, `()`, and of its gradients, after its backward pass."""
        self._losses.append(loss.detach())
        self._watch.end_micro_batch()

    def before_update(self) -> None:
        """Raise NonFiniteGradientError on all ranks, before any clipping, which would spread NaN to all parameters.

        The losses alone count under a loss scaler, which skips updates with infinite gradients by itself, and under
        DeepSpeed, whose engine has made the update by now.
        """
        values = list(self._losses)
        if not scaler_takes_care(self._optimizer):
            values.append(largest_magnitude(self._model.parameters()))
        if not finite_on_all_ranks(values, self._accelerator.device):
            raise NonFiniteGradientError(self._number(), gather_from_ranks(self._findings()))
        self.begin_update()

    def _findings(self) -> Findings:
        gradients = dict(self._watch.findings())
        found = []
        for number, loss in enumerate(self._losses, start=1):
            of_loss = [] if loss.isfinite() else [LOSS]
            found.append((number, of_loss + gradients.get(number, [])))
        return [(number, names) for number, names in found if names]
