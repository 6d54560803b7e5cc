"""Exact full-batch gradients in micro-batches, for losses that are no mean over samples."""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from hf_memopt.training.rank_exchange import (
    backward_from_outputs,
    backward_to_outputs,
    begin_window,
    check_distributed_type,
    check_first_window,
    check_not_joined,
    engine_of,
    exchange_if,
    exchanges_each_batch,
    gathers_weights,
    max_over_ranks,
)
from hf_memopt.training.repeatable import CachedForward, ForwardFn, LossFn, RandomState
from hf_memopt.training.step import OpenStep, StepResult


class GradientCache:
    """The gradient of a loss that needs all samples at once, with the activations of one micro-batch at a time.

    Sliced Wasserstein distances, contrastive losses and losses on batch statistics do not add up over micro-batches.
    Here every micro-batch runs forward without gradients, the loss of all outputs gives the gradient of each output,
    and every micro-batch runs forward again, with the same random numbers, and backward from its outputs' gradients. By
    the chain rule that is the full batch's gradient, up to rounding.

    Source: L. Gao, Y. Zhang, J. Han, J. Callan: Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup
    (GradCache), 2021, arXiv:2101.06983.

    Args:
        accelerator: prepared the models. With several ranks, under DDP, FSDP2 or DeepSpeed's ZeRO-2 and ZeRO-3, the
            loss sees the outputs of all.
        forward_fn: called twice on each micro-batch, with the same result; returns a tensor or a tuple of tensors,
            samples first: `(n, ...)`. Tensors without a gradient, such as labels, may be among them.
        loss_fn: called with those tensors, each concatenated over all micro-batches and ranks: `(N, ...)`; returns the
            loss, `()`. Every rank computes it, with the same random numbers of torch and of Python. Its own parameters
            get their gradient too; with several ranks they must not be those of a prepared model.
        models: the prepared models that `forward_fn` calls. Needed with several ranks, to exchange gradients once, in
            the last backward; None: `forward_fn` is the model.

    Works with autocast (around `backward` too), loss scalers, activation checkpointing and `ActivationOffloader`. Costs
    one more forward pass, and memory for all outputs and their gradients. Random numbers of torch and of Python are
    replayed, NumPy's are not. Modules that keep running statistics (BatchNorm in training mode) update them twice, and
    normalise by micro-batch.

    Example:
        >>> cache = GradientCache(accelerator, model, contrastive_loss)
        >>> for micro_batches in windows:
        ...     result = cache.step(micro_batches, optimizer, max_grad_norm=1.0)

    In a loop of one's own, `cache.backward(micro_batches)` takes the place of `accelerator.backward(loss)`. In another
    library's loop, such as Trainer's, `cache.loss(micro_batches)` is the loss that it calls `backward` of. Under
    DeepSpeed, which applies gradients itself, there is `step` alone, in float32 or bfloat16.

    Raises:
        ValueError: `models` are needed, or the accelerator uses FSDP1, Megatron-LM, XLA, or DeepSpeed in fp16, whose
            loss scale the outputs' gradients would not have.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        forward_fn: ForwardFn,
        loss_fn: LossFn,
        *,
        models: Sequence[nn.Module] | None = None,
    ) -> None:
        check_distributed_type(accelerator)
        engine = engine_of(accelerator)
        if engine is not None and engine.fp16_enabled():
            raise ValueError("fp16: DeepSpeed's loss scale would not reach the gradients of outputs; use bf16")
        if models is None and not isinstance(forward_fn, nn.Module) and accelerator.num_processes > 1:
            raise ValueError(
                "models=None needs a prepared model as forward_fn; give models=[...] that forward_fn calls"
            )
        self._accelerator = accelerator
        self._forward_fn = forward_fn
        self._loss_fn = loss_fn
        self._models: Sequence[Any] = models if models is not None else [forward_fn]

    def backward(self, micro_batches: Iterable[Any]) -> Tensor:
        """Add the full batch's gradient to the parameters' `.grad`, as `accelerator.backward(loss)` would.

        Args:
            micro_batches: at least one on every rank, of any sizes. All are held meanwhile.

        Returns:
            The loss, `()`, without gradient history, the same on all ranks.

        Raises:
            ValueError: `micro_batches` is empty, or under FSDP2 and DeepSpeed of another number than on another rank;
                `forward_fn` does not return tensors with samples first; DeepSpeed is used, or DDP in torch's `Join`, or
                with `static_graph` and more than one micro-batch in the first backward.

        After an exception gradients are incomplete: call `optimizer.zero_grad()`.
        """
        self._check_no_engine("backward")
        return self._backward(micro_batches)

    def _backward(self, micro_batches: Iterable[Any]) -> Tensor:
        # 1. All outputs, without graphs: only one micro-batch's activations exist at a time.
        replay = self._replay(micro_batches)
        # 2. The loss of all, and its gradient by each output. The loss scale that accelerate applies here carries over
        #    to the gradients of the outputs, and from them to all that follow.
        loss = self._loss_of_all_ranks(*replay.leaves)
        backward_to_outputs(self._accelerator, loss)
        engine = engine_of(self._accelerator)
        if engine is not None:  # up to here an error leaves nothing behind
            begin_window(engine)
        # 3. Each micro-batch again, with its random numbers, and backward from its outputs' gradients.
        replay.backward([leaf.grad for leaf in replay.leaves])
        return loss.detach()

    def loss(self, micro_batches: Iterable[Any]) -> Tensor:
        """Return the loss of all samples, `()`, the same on all ranks; its `backward()` reaches the weights as above.

        For training loops that call `backward` themselves: return it from a Trainer's `compute_loss`. Their loss scale
        and their division by accumulation steps reach all gradients. In evaluation it is the loss alone.
        `micro_batches` and errors are those of `backward`.

        The second forward passes run inside of the backward: what they save is offloaded if `forward_fn` enters an
        `offload_context` by itself, or calls a model that an `ActivationOffloader` wraps.
        """
        self._check_no_engine("loss")
        return self._replay(micro_batches).loss(self._loss_of_all_ranks)

    def step(
        self,
        micro_batches: Iterable[Any],
        optimizer: AcceleratedOptimizer,
        *,
        max_grad_norm: float | None = None,
        scheduler: Any = None,
    ) -> StepResult:
        """Drop gradients, run `backward`, clip, check, update: one optimizer step, as `train_step` makes it.

        Gradients of `models`, and of `loss_fn` if it is a module, are clipped and checked. `micro_batches` are as in
        `backward`, all else is as in `train_step`.

        Raises:
            ValueError: as from `backward`, as from `train_step` about the accelerator and the optimizer, `models` were
                not given and `forward_fn` is none, or under DeepSpeed `loss_fn` has parameters or there are two models.
            NonFiniteGradientError: as from `train_step`. A loss of all samples has one gradient, so everything that is
                not finite is put down to micro-batch 1.
        """
        micro_batches = list(micro_batches)
        if not all(isinstance(model, nn.Module) for model in self._models):
            raise ValueError(
                "models=None: step clips and checks their gradients; give models=[...] that forward_fn calls"
            )
        modules = [*self._models]
        if isinstance(self._loss_fn, nn.Module) and any(True for _ in self._loss_fn.parameters()):
            modules.append(self._loss_fn)
        model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        engine = engine_of(self._accelerator)
        if engine is not None and model is not engine:
            raise ValueError(
                f"models, loss_fn: {len(modules)} modules, of which DeepSpeed's engine is one at most; put all "
                "parameters into the model that the accelerator prepares, and let loss_fn have none"
            )
        with OpenStep(self._accelerator, model, optimizer, max_grad_norm, scheduler) as step:
            if engine is None:
                step.watch.remove()  # it would look at every parameter in every micro-batch
                loss = self._backward(micro_batches)
                step.watch.note_totals()
            else:
                loss = self._backward(micro_batches)
                step.watch.end_micro_batch()  # the engine leaves no totals in the parameters
            # Every rank has the whole loss, and the parts of all ranks are added up.
            return step.update(loss / self._accelerator.num_processes, len(micro_batches))

    def _replay(self, micro_batches: Iterable[Any]) -> CachedForward:
        micro_batches = list(micro_batches)
        check_not_joined(self._models)
        self._check_number(len(micro_batches))
        if torch.is_grad_enabled():
            check_first_window(self._accelerator, self._models, len(micro_batches))
        always = exchanges_each_batch(self._accelerator)
        return CachedForward(
            self._forward_fn,
            micro_batches,
            self._accelerator.device,
            around=lambda is_last: exchange_if(self._accelerator, self._models, is_last or always),
            backward=partial(backward_from_outputs, self._accelerator),
        )

    def _check_number(self, number: int) -> None:
        """Raise unless all ranks run as many passes, each of which takes all ranks under FSDP2 and ZeRO."""
        if not gathers_weights(self._accelerator):
            return
        most, least = (max_over_ranks(self._accelerator, number), -max_over_ranks(self._accelerator, -number))
        if most != least:
            raise ValueError(
                f"micro_batches: {number} on this rank, {least} to {most} on all; under FSDP2 and DeepSpeed give all "
                "ranks the same number"
            )

    def _check_no_engine(self, method: str) -> None:
        if engine_of(self._accelerator) is not None:
            raise ValueError(f"{method}: DeepSpeed applies gradients itself, so that this would end nowhere; use step")

    def _loss_of_all_ranks(self, *leaves: Tensor) -> Tensor:
        with _same_draws_on_all_ranks(self._accelerator):
            return self._loss_fn(*(_of_all_ranks(self._accelerator, leaf) for leaf in leaves))


@contextmanager
def _same_draws_on_all_ranks(accelerator: Accelerator) -> Iterator[None]:
    """Random numbers inside are the same on all ranks; each rank's own go on afterwards as they were."""
    if accelerator.num_processes == 1:
        yield
        return
    seeds = accelerator.gather(torch.randint(2**62, (1,)).to(accelerator.device))
    own = RandomState(accelerator.device)
    try:
        torch.manual_seed(int(seeds[0]))
        random.seed(int(seeds[0]))
        yield
    finally:
        own.restore()


def _of_all_ranks(accelerator: Accelerator, own: Tensor) -> Tensor:
    """Return the samples of all ranks, in the order of ranks, with this rank's own tensor in its place in the graph."""
    if accelerator.num_processes == 1:
        return own
    sizes = accelerator.gather(torch.tensor([len(own)], device=own.device)).tolist()
    padded = accelerator.gather(accelerator.pad_across_processes(own.detach()).contiguous())
    parts = [part[:size] for part, size in zip(padded.split(max(sizes)), sizes, strict=True)]
    parts[accelerator.process_index] = own
    if own.requires_grad:
        # Every rank computes the gradient of the whole loss, and keeps the part of its own outputs. The parameters'
        # gradient is the sum over ranks; DDP takes the mean, so multiply by the number of ranks here.
        own.register_hook(lambda gradient: gradient * accelerator.num_processes)  # type: ignore[no-untyped-call]
    return torch.cat(parts)
