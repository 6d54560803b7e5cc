"""Micro-batches as large as memory allows, with an effective batch that does not change."""

import logging
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import is_compiled_module
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_memopt.ranges import COUNT
from hf_memopt.training.rank_exchange import (
    check_distributed_type,
    check_exchange_after_backward,
    check_not_joined,
    gathers_weights,
    max_over_ranks,
)
from hf_memopt.training.repeatable import BufferState, RandomState
from hf_memopt.training.step import LossFn, OpenStep, StepResult, train_step
from hf_memopt.training.window import WeightFn, normalized_weights, num_samples, split_batch, take

logger = logging.getLogger(__name__)

# Errors that Accelerate's test misses: messages without its full stop, libraries that allocate by themselves, and
# NVML's assertion in an allocator that was just refused memory.
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|_ALLOC_FAILED|NVML_SUCCESS == r", re.IGNORECASE)


class MicroBatcher:
    """Trains on whole batches in micro-batches, and halves these when memory runs out.

    A step that runs out of memory on any rank starts over on all ranks, on the same batch in micro-batches of half the
    size: gradients, random numbers and the model's buffers are put back. Each sample counts exactly once in the step's
    gradient. The smaller size is kept, and logged once.

    Under FSDP2 and DeepSpeed's ZeRO-2 and ZeRO-3 no rank can go back, since the others wait for its weights or
    gradients. There a step is `train_step`'s, and an out-of-memory error says which size to begin with.

    Args:
        accelerator: made the model and the optimizer that train.
        micro_batch_size: samples per micro-batch and rank to begin with; `find_micro_batch` finds one.

    Attributes:
        micro_batch_size: the size now in use, the same on all ranks.

    Under DDP, ranks exchange gradients after the last backward instead of within it, because no rank may be in the
    middle of an exchange when another one runs out of memory. With many ranks, `train_step` on micro-batches that are
    known to fit is faster. Each step copies the model's buffers.

    Example:
        >>> batcher = MicroBatcher(accelerator, micro_batch_size=64)
        >>> for batch in data:  # this rank's part of the effective batch
        ...     result = batcher.train_step(model, loss_fn, batch, optimizer, max_grad_norm=1.0)
    """

    def __init__(self, accelerator: Accelerator, micro_batch_size: int) -> None:
        COUNT.check("micro_batch_size", micro_batch_size)
        check_distributed_type(accelerator)
        self._accelerator = accelerator
        self.micro_batch_size = micro_batch_size

    def train_step(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Any,
        optimizer: AcceleratedOptimizer,
        *,
        weight_fn: WeightFn | None = None,
        max_grad_norm: float | None = None,
        scheduler: Any = None,
    ) -> StepResult:
        """`hf_memopt.train_step` on a batch that is split here (`split_batch`).

        `batch` has this rank's samples for one optimizer step; all else is as in `train_step`.

        Raises:
            torch.OutOfMemoryError: one sample does not fit, on any rank. Under FSDP2 and DeepSpeed, on the rank itself:
                a micro-batch does not fit.
            ValueError, NonFiniteGradientError: as `train_step`, and `split_batch`'s; DDP's `static_graph` before the
                first exchange, which a step of `train_step` on one micro-batch has to make.
        """
        if gathers_weights(self._accelerator):
            size = self.micro_batch_size
            micro_batches = list(split_batch(batch, size))
            step_on = partial(train_step, weight_fn=weight_fn, max_grad_norm=max_grad_norm, scheduler=scheduler)
            try:
                return step_on(self._accelerator, model, loss_fn, micro_batches, optimizer)
            except RuntimeError as error:
                if is_out_of_memory(error) and size > 1:
                    error.add_note(
                        f"micro_batch_size={size} does not fit, and MicroBatcher cannot halve it under FSDP2 and "
                        f"DeepSpeed, whose ranks wait for each other: begin with {math.ceil(size / 2)}, or with what "
                        "hf-memopt plan says"
                    )
                raise
        check_exchange_after_backward([model])
        with OpenStep(self._accelerator, model, optimizer, max_grad_norm, scheduler) as step:

            def attempt(size: int) -> tuple[Tensor, int]:
                step.drop_gradients()
                micro_batches = list(split_batch(batch, size))
                weighted = normalized_weights(self._accelerator, model, micro_batches, weight_fn)
                return step.accumulate(loss_fn, weighted, sync=False), len(weighted)

            size, (loss, num_micro_batches) = _first_that_fits(self._accelerator, model, self.micro_batch_size, attempt)
            if size < self.micro_batch_size and self._accelerator.is_main_process:
                logger.warning(
                    "out of memory with micro-batches of %d samples; from now on %d, with more of them, so that the "
                    "effective batch stays the same",
                    self.micro_batch_size,
                    size,
                )
            self.micro_batch_size = size
            _sum_gradients(self._accelerator, model)
            return step.update(loss, num_micro_batches)


def find_micro_batch(
    accelerator: Accelerator, model: nn.Module, loss_fn: LossFn, batch: Any, *, effective_batch: int
) -> int:
    """Return the largest micro-batch, of those that halving gives, whose forward and backward fit on every rank.

    Tries a rank's samples per optimizer step, half of them, and so on, with two micro-batches in a row, because the
    second one meets the gradients of the first. Gradients are dropped at the end; parameters, buffers and random
    numbers are as before.

    Args:
        accelerator: with several ranks, under DDP.
        model: prepared by `accelerator`.
        loss_fn: as in `train_step`.
        batch: samples to try with, any number; repeated to make larger micro-batches, so take the longest ones.
        effective_batch: samples of all ranks in one optimizer step; a multiple of the number of ranks.

    Returns:
        Samples per micro-batch and rank, for `MicroBatcher` or a loader.

    Raises:
        ValueError: `effective_batch` cannot be divided among ranks, the accelerator uses FSDP2, DeepSpeed, or DDP in
            torch's `Join` or with `static_graph` before its first exchange; or `split_batch`'s.
        torch.OutOfMemoryError: one sample does not fit.

    An optimizer that makes its state in the first step needs more memory from then on: call this after a step, or let
    `MicroBatcher` halve the result if it must.
    """
    COUNT.check("effective_batch", effective_batch)
    if gathers_weights(accelerator):
        raise ValueError(
            "find_micro_batch cannot go back under FSDP2 and DeepSpeed: a rank that runs out of memory in forward or "
            "backward leaves the others waiting for its weights. Take a size from hf-memopt plan"
        )
    check_distributed_type(accelerator)
    check_not_joined([model])
    check_exchange_after_backward([model])
    num_samples_of_rank, rest = divmod(effective_batch, accelerator.num_processes)
    if rest:
        raise ValueError(
            f"effective_batch={effective_batch} cannot be divided evenly among {accelerator.num_processes} processes; "
            "use a multiple of their number"
        )

    def attempt(size: int) -> bool:
        model.zero_grad(set_to_none=True)
        rows = [row % num_samples(batch) for row in range(size)]
        for _ in range(min(2, math.ceil(num_samples_of_rank / size))):
            with accelerator.no_sync(model):
                accelerator.backward(loss_fn(model, take(batch, rows)))
        return True

    random, buffers = RandomState(accelerator.device), BufferState(model)
    try:
        size, _ = _first_that_fits(accelerator, model, num_samples_of_rank, attempt)
    finally:
        model.zero_grad(set_to_none=True)
        random.restore()
        buffers.restore()
    return size


def _first_that_fits[T](
    accelerator: Accelerator, model: nn.Module, size: int, attempt: Callable[[int], T]
) -> tuple[int, T]:
    """Return the first of size, half of it and so on for which `attempt(size)` fits on all ranks, and its result."""
    # Buffers and random numbers are put back here, gradients by the attempt itself, so that the attempt that fits
    # counts as the first.
    _share_buffers(model)
    random, buffers = RandomState(accelerator.device), BufferState(model)
    while True:
        try:
            result, error = attempt(size), None
        except RuntimeError as caught:
            if not is_out_of_memory(caught):
                raise
            result, error = None, caught
        # If one rank runs out of memory, all start over, because they have to make the same exchanges.
        if not max_over_ranks(accelerator, int(error is not None)):
            assert result is not None
            return size, result
        if size == 1:
            raise error or torch.OutOfMemoryError("out of memory on another rank with one sample per micro-batch")
        # The error's traceback refers to frames whose variables hold the failed forward's results. It has to go before
        # the cache is emptied; so has the result of a rank on which the attempt did fit.
        error = result = None
        clear_device_cache(garbage_collection=True)
        random.restore()
        buffers.restore()
        size = math.ceil(size / 2)


def is_out_of_memory(error: RuntimeError) -> bool:
    if isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error):
        return True
    return not isinstance(error, dist.DistError) and _OUT_OF_MEMORY.search(str(error)) is not None


def _share_buffers(model: nn.Module) -> None:
    """Give all ranks the first one's buffers, as DDP does in the next forward: here no rank can have failed yet."""
    inner = model._orig_mod if is_compiled_module(model) else model
    if isinstance(inner, DistributedDataParallel):
        for buffer in inner.module.buffers() if inner.broadcast_buffers else ():
            dist.broadcast(buffer, 0)
        inner.require_forward_param_sync = False


def _sum_gradients(accelerator: Accelerator, model: nn.Module) -> None:
    """Add up gradients over ranks in place. Parameters that some ranks did not use have a gradient of 0 there."""
    if accelerator.num_processes == 1:
        return
    # Ranks first agree on the parameters with a gradient anywhere. All exchange the same ones, and a gradient that no
    # rank has must stay None: with zeros, optimizers with momentum would update the parameter.
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    used = torch.tensor([parameter.grad is not None for parameter in parameters], device=accelerator.device).float()
    dist.all_reduce(used, dist.ReduceOp.MAX)
    parameters = [parameter for parameter, is_used in zip(parameters, used.tolist(), strict=True) if is_used]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    exchanges = [dist.all_reduce(parameter.grad, async_op=True) for parameter in parameters]
    for exchange in exchanges:
        exchange.wait()
