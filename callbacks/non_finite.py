"""Stop before a gradient that is not finite destroys the parameters."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_MAX_NAMES = 5

Findings = list[tuple[int, list[str]]]  # micro-batch, counted from 1, and parameters in the order of backward


class NonFiniteGradientError(FloatingPointError):
    """A gradient was infinite or NaN; the parameters are those of the step before.

    Attributes:
        step: the optimizer step that was not taken, counted from 1.
        findings: for each rank, the micro-batches whose own gradients were not finite, with the parameters' names in
            the order in which backward reached them. Empty where the overflow came from adding up micro-batches or
            ranks.
    """

    def __init__(self, step: int, findings: list[Findings]) -> None:
        super().__init__(_describe(step, findings))
        self.step = step
        self.findings = findings


class StopOnNonFiniteCallback(TrainerCallback):
    """Ends training with `NonFiniteGradientError`, on all ranks, before a non-finite gradient reaches the optimizer.

    Without it, Trainer hands a NaN gradient to the optimizer, which makes all parameters NaN, and logs a loss of 0.0
    (`logging_nan_inf_filter`).

    A loss scaler (fp16) finds infinite gradients on its own, skips the step and halves its scale, so nothing is done
    as long as its scale is above 1. At a scale of 1 or less, the gradient itself is not finite, and training ends.

    Hooks on the parameters see each micro-batch's gradient before it is added up over micro-batches and ranks; that is
    what tells rank, micro-batch and parameter. They are taken off when training ends. The gradients, and so the
    training, are bitwise what they are without.

    Cost: one reduction over each gradient in every micro-batch and one over all of them per optimizer step, an
    all-reduce of 4 bytes, and one wait of the host for the device per optimizer step.

    Raises:
        ValueError: when training begins, under DeepSpeed, which updates parameters within backward.
        NonFiniteGradientError: during training.

    Example:
        >>> Trainer(..., callbacks=[StopOnNonFiniteCallback()])
    """

    def __init__(self) -> None:
        self._watch: _GradientWatch | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: Any
    ) -> None:
        if args.deepspeed is not None:
            raise ValueError(
                "deepspeed: its engine updates parameters before Trainer could stop it. Leave StopOnNonFiniteCallback "
                "out; in fp16, DeepSpeed skips such steps by itself"
            )
        # Fires again, without an end in between, when auto_find_batch_size starts over or after an exception.
        self.remove()
        self._watch = _GradientWatch(model)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._running_watch().begin_step()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._running_watch().end_micro_batch()

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Any,
        **kwargs: Any,
    ) -> None:
        watch = self._running_watch()
        watch.end_micro_batch()
        if _is_finite_everywhere(model.parameters(), args.device) or _scaler_takes_care(optimizer):
            return
        findings = _gather(watch.findings())
        self.remove()
        raise NonFiniteGradientError(state.global_step + 1, findings)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def _running_watch(self) -> "_GradientWatch":
        assert self._watch is not None, "Trainer calls on_train_begin before any step"
        return self._watch


class _GradientWatch:
    """The largest magnitude of each parameter's gradient in each micro-batch of a step, left on the device."""

    def __init__(self, model: nn.Module) -> None:
        self._handles = [
            parameter.register_hook(partial(self._note, name))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.numel()
        ]
        self.begin_step()

    def begin_step(self) -> None:
        self._names: list[str] = []
        self._largest: list[Tensor] = []
        self._micro_batches: list[tuple[list[str], Tensor]] = []

    def end_micro_batch(self) -> None:
        # One small tensor per micro-batch: as many as there are parameters would take an allocator block each.
        largest = [each.to(self._largest[0].device) for each in self._largest]
        stacked = torch.stack(largest) if largest else torch.zeros(0)
        self._micro_batches.append((self._names, stacked))
        self._names, self._largest = [], []

    def findings(self) -> Findings:
        found = []
        for number, (names, largest) in enumerate(self._micro_batches, start=1):
            bad = [name for name, value in zip(names, largest.tolist(), strict=True) if not math.isfinite(value)]
            if bad:
                found.append((number, bad))
        return found

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, name: str, gradient: Tensor) -> None:
        self._names.append(name)
        # The largest magnitude cannot overflow, as a sum could.
        self._largest.append(torch.linalg.vector_norm(_values(gradient), math.inf).float())


def _values(gradient: Tensor) -> Tensor:
    """This rank's entries of a gradient that may be sparse or sharded."""
    gradient = gradient.detach()
    if gradient.is_sparse:
        return gradient._values()
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


def _is_finite_everywhere(parameters: Iterable[nn.Parameter], device: torch.device) -> bool:
    """Whether the gradients are finite on all ranks, which have to call this together."""
    gradients = [_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
    gradients = [gradient for gradient in gradients if gradient.numel()]
    largest = torch.nn.utils.get_total_norm(gradients, math.inf)
    non_finite = torch.logical_not(largest.isfinite()).to(device, torch.float32)
    if _num_ranks() > 1:
        dist.all_reduce(non_finite, dist.ReduceOp.MAX)
    return not non_finite.item()


def _scaler_takes_care(optimizer: Any) -> bool:
    scaler = getattr(optimizer, "scaler", None)
    return scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1


def _gather(findings: Findings) -> list[Findings]:
    if _num_ranks() == 1:
        return [findings]
    gathered: list[Any] = [None] * _num_ranks()
    dist.all_gather_object(gathered, findings)
    return gathered


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _describe(step: int, findings: list[Findings]) -> str:
    lines = [f"Non-finite gradient at step {step}. It was not applied: the parameters are those of step {step - 1}."]
    for rank, of_rank in enumerate(findings):
        for micro_batch, names in of_rank:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            lines.append(f"  rank {rank}, micro-batch {micro_batch}: {', '.join(names[:_MAX_NAMES])}{more}")
    if len(lines) == 1:
        lines.append("  Each micro-batch's own gradient was finite; their sum over micro-batches and ranks overflowed.")
    return "\n".join(lines)
