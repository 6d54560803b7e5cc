"""One optimizer step on Accelerate whose gradient is exactly that of all micro-batches together."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_memopt.memory.device_counters import counters_for
from hf_memopt.memory.ranks import gather_from_ranks
from hf_memopt.ranges import Range
from hf_memopt.training.finite_check import Findings, GradientWatch, NonFiniteGradientError, scaler_takes_care
from hf_memopt.training.loss_terms import wide
from hf_memopt.training.rank_exchange import (
    apply_by_engine,
    backward,
    begin_window,
    check_distributed_type,
    check_engine,
    check_first_window,
    check_not_joined,
    drop_gradients,
    engine_of,
    exchange_if,
    exchanges_each_batch,
    max_over_ranks,
    sum_over_ranks,
)
from hf_memopt.training.window import Weighted, WeightFn, normalized_weights

LossFn = Callable[[nn.Module, Any], Tensor]
_counters = cache(counters_for)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step.

    Attributes:
        loss: weighted mean over all micro-batches and ranks, the same on all ranks.
        grad_norm: L2 norm of the gradient before clipping, the same on all ranks; not finite in a skipped step.
        num_micro_batches: how many ran on this rank.
        peak_bytes: the most that tensors held on this rank's device since its peak counter was last reset, which this
            never does; None where torch keeps no counters, as on the CPU.
        skipped: whether the fp16 loss scaler left out the update because of an overflow. It then lowers its scale.
    """

    loss: float
    grad_norm: float
    num_micro_batches: int
    peak_bytes: int | None
    skipped: bool


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    loss_fn: LossFn,
    micro_batches: Iterable[Any],
    optimizer: AcceleratedOptimizer,
    *,
    weight_fn: WeightFn | None = None,
    max_grad_norm: float | None = None,
    scheduler: Any = None,
) -> StepResult:
    """Forward, backward, clip, check, update: one step on a window of micro-batches.

    The gradient is sum(w_i * grad(loss_i)) / sum(w_i), over all micro-batches of all ranks, however many each rank has:
    the last window of an epoch divides by its own weights. The division by `gradient_accumulation_steps` in
    `Accelerator.backward` is undone.

    Ranks exchange gradients once, in the backward of the last micro-batch; under FSDP2 each holds the gradients of the
    whole model until then, unless `sync_each_batch=True` of accelerate's plugin has them exchanged each time. Gradients
    are dropped before the step and after it, also when it raises. In mixed precision the prepared model runs under
    autocast, and the accelerator's scaler is used where there is one.

    Under DeepSpeed (ZeRO-2 and ZeRO-3) its engine exchanges gradients in each backward, clips by its own
    `gradient_clipping`, and scales in fp16. It cannot drop gradients: after an error in the middle of a window, or a
    `NonFiniteGradientError`, further steps are refused.

    Args:
        accelerator: steps are counted in `accelerator.step`, which `save_state` saves and `load_state` restores.
        model: prepared by `accelerator`.
        loss_fn: called as `loss_fn(model, micro_batch)`, returns the mean loss of the micro-batch, `()`. Losses that do
            not add up over micro-batches need `GradientCache`.
        micro_batches: at least one, on the device. All are held during the step.
        optimizer: prepared by `accelerator`.
        weight_fn: the weight of a micro-batch; a number, or a tensor `()`, best on the CPU. None: the labels that are
            not -100 where it is a mapping with `labels`, and else its samples (`default_weight`). Micro-batches that
            weigh 0 are left out; only if all of a rank's weigh 0, the last one runs, for the sake of the other ranks,
            and its gradient must be finite. Under FSDP2 and DeepSpeed a rank with fewer than the others runs its last
            one again, with 0.
        max_grad_norm: clip the whole step's gradient to this L2 norm. None: do not clip. DeepSpeed's
            `gradient_clipping` has to be the same.
        scheduler: stepped after the update, and not after a skipped one.

    Raises:
        ValueError: on all ranks: a rank has no micro-batch, a weight is negative or not finite, or all are 0; without a
            `weight_fn`, a micro-batch whose samples cannot be counted; DDP's `static_graph` and a first window of more
            than one micro-batch. On the rank itself: called within `accelerator.accumulate` or torch's `Join`,
            `optimizer` was not prepared, `max_grad_norm` is not positive or not DeepSpeed's, or the accelerator uses
            ZeRO-1 or no ZeRO in DeepSpeed, FSDP1, Megatron-LM or XLA.
        NonFiniteGradientError: on all ranks, before the update, with step, rank, micro-batch and parameters. With a
            loss scaler only once its scale is down to 1; above that the scaler skips the step.

    Cost beyond a plain loop: one reduction over each parameter's gradient in every micro-batch, and one wait of the
    host for the device. With several ranks, two all-reduces of 16 bytes more, and a second wait.

    Example:
        >>> for window in windows:  # lists of micro-batches
        ...     result = train_step(accelerator, model, loss_fn, window, optimizer, max_grad_norm=1.0)
    """
    with OpenStep(accelerator, model, optimizer, max_grad_norm, scheduler) as step:
        weighted = normalized_weights(accelerator, model, list(micro_batches), weight_fn)
        check_first_window(accelerator, [model], len(weighted))
        return step.update(step.accumulate(loss_fn, weighted, sync=True), len(weighted))


@dataclass
class OpenStep:
    """A step that collects gradients, from none on, and ends with `update`; ValueError as from `train_step`.

    As a context it leaves no gradients behind, even after an error.
    """

    accelerator: Accelerator
    model: nn.Module
    optimizer: AcceleratedOptimizer
    max_grad_norm: float | None
    scheduler: Any

    def __post_init__(self) -> None:
        accelerator, model = self.accelerator, self.model
        check_distributed_type(accelerator)
        self.engine = engine_of(accelerator)
        if self.engine is not None:
            check_engine(self.engine, self.max_grad_norm)
        if not isinstance(self.optimizer, AcceleratedOptimizer):
            raise ValueError(
                f"optimizer={type(self.optimizer).__name__} was not prepared, so a loss scaler would be ignored; "
                "pass it through accelerator.prepare"
            )
        if not accelerator.sync_gradients:
            raise ValueError(
                "sync_gradients=False: accelerator.accumulate is in the middle of a window, or ended there, and "
                "suppresses updates. Call this outside of it, and after an unfinished window set "
                "accelerator.sync_gradients = True"
            )
        Range(above=0, why="; None does not clip").check("max_grad_norm", self.max_grad_norm)
        check_not_joined([model])
        is_wrapped = isinstance(model, DistributedDataParallel) or self.engine is not None
        inner: Any = model.module if is_wrapped else model
        self.watch = GradientWatch(inner)
        self.drop_gradients()

    def __enter__(self) -> "OpenStep":
        return self

    def __exit__(self, *error: object) -> None:
        self.watch.remove()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop gradients of the model and of all else that the optimizer updates, and the notes on them."""
        drop_gradients(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        self.watch.begin_step()

    def accumulate(self, loss_fn: LossFn, weighted: Weighted, *, sync: bool) -> Tensor:
        """Leave the gradient in the parameters, with `sync` that of all ranks; return this rank's part of the loss."""
        accelerator = self.accelerator
        # Exchanging takes the mean over ranks, which is undone here, because the weights already divide by the weight
        # of all micro-batches of all ranks.
        factor = accelerator.num_processes if sync else 1
        if self.engine is not None:
            begin_window(self.engine)
        total = torch.zeros((), device=accelerator.device)
        for number, (micro_batch, weight) in enumerate(weighted, start=1):
            is_due = sync and (number == len(weighted) or exchanges_each_batch(accelerator))
            with exchange_if(accelerator, [self.model], is_due):
                loss = loss_fn(self.model, micro_batch)
                backward(accelerator, loss * (weight * factor))
            self.watch.end_micro_batch()
            # A weight of 0 stands for a loss that may be NaN, and NaN times 0 would be NaN.
            if weight:
                total = total + wide(loss.detach()) * weight
        return total

    def update(self, loss: Tensor, num_micro_batches: int) -> StepResult:
        """Clip and check the gradient of all ranks, and apply it. The ranks' `loss`, `()`, add up to the step's."""
        accelerator, optimizer = self.accelerator, self.optimizer
        grad_norm = self._clip_and_apply() if self.engine is None else self._apply_by_engine()
        accelerator.step += 1
        if self.scheduler is not None and not optimizer.step_was_skipped:
            self.scheduler.step()
        (loss_of_all,) = sum_over_ranks(accelerator, [float(loss)])
        counters = _counters(accelerator.device)
        peak_bytes = counters.read().peak_allocated_bytes if counters else None
        return StepResult(loss_of_all, grad_norm, num_micro_batches, peak_bytes, optimizer.step_was_skipped)

    def _clip_and_apply(self) -> float:
        max_norm = math.inf if self.max_grad_norm is None else self.max_grad_norm
        # All ranks hold the same gradient, so they decide alike. Under a loss scaler this unscales the gradient first,
        # and float() waits for the device.
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(grad_norm) and not scaler_takes_care(self.optimizer):
            self._stop(self.watch.findings())
        # With a scaler, an overflow leaves the parameters as they are, and the step counts all the same.
        self.optimizer.step()
        return grad_norm

    def _apply_by_engine(self) -> float:
        # The norm is known only after the update, so the micro-batches' own gradients decide; ranks decide alike.
        findings = self.watch.findings()
        if max_over_ranks(self.accelerator, bool(findings)) and not self.engine.fp16_enabled():
            self._stop(findings)
        return apply_by_engine(self.engine)

    def _stop(self, findings: Findings) -> NoReturn:
        raise NonFiniteGradientError(self.accelerator.step + 1, gather_from_ranks(findings))
