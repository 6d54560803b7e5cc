"""Stop before a gradient that is not finite destroys the parameters."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from hf_memopt.memory.ranks import gather_from_ranks
from hf_memopt.training.finite_check import (
    GradientWatch,
    NonFiniteGradientError,
    finite_on_all_ranks,
    largest_magnitude,
    scaler_takes_care,
)


class StopOnNonFiniteCallback(TrainerCallback):
    """Ends training with `NonFiniteGradientError`, on all ranks, before a non-finite gradient reaches the optimizer.

    Without it, a NaN gradient makes all parameters NaN, and Trainer logs a loss of 0.0 (`logging_nan_inf_filter`). A
    loss scaler (fp16) skips steps with infinite gradients and halves its scale, so only at a scale of 1 or less
    training ends.

    Hooks see each micro-batch's gradient before it is added up; so they tell rank, micro-batch and parameter. They are
    taken off when training ends, and leave it bitwise the same.

    Cost: one reduction over each gradient in every micro-batch and one over all of them per optimizer step, an
    all-reduce of 4 bytes, and one wait of the host for the device per optimizer step.

    Raises:
        ValueError: when training begins, under DeepSpeed, which updates parameters within backward.
        NonFiniteGradientError: during training.

    Example:
        >>> Trainer(..., callbacks=[StopOnNonFiniteCallback()])
    """

    def __init__(self) -> None:
        self._watch: Any = None  # a GradientWatch, while training goes on

    def on_train_begin(self, args: TrainingArguments, *others: Any, model: nn.Module, **kwargs: Any) -> None:
        if args.deepspeed is not None:
            raise ValueError(
                "deepspeed: its engine updates parameters before Trainer could stop it. Leave StopOnNonFiniteCallback "
                "out; in fp16, DeepSpeed skips such steps by itself"
            )
        # May come twice without an end in between: auto_find_batch_size starts over, and an exception ends nothing.
        self.remove()
        self._watch = GradientWatch(model)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._watch.begin_step()

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self._watch.end_micro_batch()

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *others: Any,
        model: nn.Module,
        optimizer: Any,
        **kwargs: Any,
    ) -> None:
        self._watch.end_micro_batch()
        largest = largest_magnitude(model.parameters())
        if finite_on_all_ranks([largest], args.device) or scaler_takes_care(optimizer):
            return
        findings = gather_from_ranks(self._watch.findings())
        self.remove()
        raise NonFiniteGradientError(state.global_step + 1, findings)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
