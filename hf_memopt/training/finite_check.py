"""Checks of losses and gradients, and the rank, micro-batch and parameters that a non-finite one came from."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from hf_memopt.memory.ranks import gather_from_ranks, num_ranks

LOSS = "loss"  # its name beside those of parameters
_MAX_NAMES = 5

Findings = list[tuple[int, list[str]]]  # micro-batch, counted from 1, and parameters in the order of backward


class NonFiniteGradientError(FloatingPointError):
    """A gradient, or a recipe's loss, was infinite or NaN; the parameters are those of the step before.

    Attributes:
        step: the optimizer step that was not taken, counted from 1.
        findings: for each rank, the micro-batches whose own gradients were not finite, with the parameters' names in
            the order of backward, after "loss" where a recipe's loss was not. Empty where adding up micro-batches or
            ranks overflowed.
    """

    def __init__(self, step: int, findings: list[Findings]) -> None:
        super().__init__(_describe(step, findings))
        self.step = step
        self.findings = findings


class GradientWatch:
    """The largest magnitude of each parameter's gradient in each micro-batch of a step, left on the device.

    Hooks on the parameters see gradients before they are added up over micro-batches and ranks. They change nothing,
    and cost one reduction over each gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._watched: set[Tensor] = set()
        self._watch("", model)
        # FSDP2 puts whole weights into the modules before their first forward pass.
        for name, module in model.named_modules():
            is_sharded = isinstance(module, FSDPModule)
            if is_sharded:
                watch = partial(self._watch, f"{name}." if name else "")
                self._handles.append(module.register_forward_pre_hook(watch))
        self.begin_step()

    def begin_step(self) -> None:
        self._names: list[str] = []
        self._largest: list[Tensor] = []
        self._micro_batches: list[tuple[list[str], Tensor]] = []

    def end_micro_batch(self) -> None:
        # One small tensor per micro-batch: one per parameter would take an allocator block each.
        largest = [each.to(self._largest[0].device) for each in self._largest]
        stacked = torch.stack(largest) if largest else torch.zeros(0)
        self._micro_batches.append((self._names, stacked))
        self._names, self._largest = [], []

    def note_totals(self) -> None:
        """Put the present gradients down to one micro-batch, after `remove`: hooks would look at each many times."""
        for name, parameter in reversed(list(self._model.named_parameters())):  # about the order of backward
            if parameter.grad is not None and parameter.numel():
                self._note(name, parameter.grad)
        self.end_micro_batch()

    def findings(self) -> Findings:
        """Micro-batches and parameters whose gradients were not finite. Waits for the device."""
        found = []
        for number, (names, largest) in enumerate(self._micro_batches, start=1):
            bad = [name for name, value in zip(names, largest.tolist(), strict=True) if not math.isfinite(value)]
            if bad:
                found.append((number, bad))
        return found

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch(self, prefix: str, module: nn.Module, inputs: Any = ()) -> None:
        for name, parameter in module.named_parameters():
            # Between its uses ZeRO-3 leaves nothing of a weight but its size.
            numel = getattr(parameter, "ds_numel", parameter.numel())
            if parameter.requires_grad and numel and parameter not in self._watched:
                self._watched.add(parameter)
                hook = partial(self._note, prefix + name)
                self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def _note(self, name: str, gradient: Tensor) -> None:
        self._names.append(name)
        # The largest magnitude cannot overflow, as a sum could.
        self._largest.append(torch.linalg.vector_norm(local_values(gradient), math.inf).float())


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


def local_values(gradient: Tensor) -> Tensor:
    """Return this rank's entries of a gradient that may be sparse or sharded."""
    gradient = gradient.detach()
    if gradient.is_sparse:
        return gradient._values()
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


def largest_magnitude(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the largest magnitude in this rank's entries of all gradients, `()`: 0 without any."""
    gradients = [local_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient.numel()], math.inf)


def finite_on_all_ranks(values: Sequence[Tensor], device: torch.device) -> bool:
    """Return whether all values, `()` each, are finite on all ranks, which have to call this together."""
    finite = torch.stack([value.isfinite().to(device) for value in values]).all()
    non_finite = torch.logical_not(finite).to(torch.float32)
    if num_ranks() > 1:
        dist.all_reduce(non_finite, dist.ReduceOp.MAX)
    return not non_finite.item()


def scaler_takes_care(optimizer: Any) -> bool:
    """Return whether the loss scaler of Accelerate's optimizer skips steps that are not finite."""
    scaler = getattr(optimizer, "scaler", None)
    return scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1


def _describe(step: int, findings: list[Findings]) -> str:
    is_loss = any(names[0] == LOSS for of_rank in findings for _, names in of_rank)
    subject = "loss" if is_loss else "gradient"
    lines = [f"Non-finite {subject} at step {step}. That update was not made."]
    for rank, of_rank in enumerate(findings):
        for micro_batch, names in of_rank:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            lines.append(f"  rank {rank}, micro-batch {micro_batch}: {', '.join(names[:_MAX_NAMES])}{more}")
    if len(lines) == 1:
        lines.append("  Each micro-batch's own gradient was finite; their sum over micro-batches and ranks overflowed.")
    return "\n".join(lines)
