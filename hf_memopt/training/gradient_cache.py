"""Exact full-batch gradients in micro-batches, for losses that are no mean over samples."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from hf_memopt.training.repeatable import RandomState
from hf_memopt.training.step import StepResult, open_step
from hf_memopt.training.window.rank_exchange import (
    check_distributed_type,
    exchange_if,
    exchanges_each_batch,
    max_over_ranks,
)

Outputs = tuple[Tensor, ...]


class GradientCache:
    """The gradient of a loss that needs all samples at once, with the activations of one micro-batch at a time.

    Sliced Wasserstein distances, contrastive losses and losses on batch statistics do not add up over micro-batches:
    accumulating their gradients gives another gradient. Here every micro-batch runs forward without gradients, the loss
    of all outputs together gives the gradient of each output, and every micro-batch runs forward again, with the same
    random numbers, and backward from its outputs' gradients. By the chain rule that is the full batch's gradient; it
    differs from it by rounding only.

    Source: L. Gao, Y. Zhang, J. Han, J. Callan: Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup
    (GradCache), 2021, arXiv:2101.06983.

    Args:
        accelerator: prepared the models. With several ranks, under DDP or FSDP2, the loss sees the outputs of all.
        forward_fn: called twice on each micro-batch; returns a tensor or a tuple of tensors, samples first: `(n, ...)`.
            Tensors without a gradient, such as labels, may be among them.
        loss_fn: called with those tensors, each concatenated over all micro-batches and ranks: `(N, ...)`; returns the
            loss, `()`. Every rank computes it, with the same random numbers of torch and of Python. Parameters of its
            own get their gradient too; with several ranks they must not be those of a prepared model.
        models: the prepared models that `forward_fn` calls. Needed with several ranks, so that they exchange gradients
            once, in the last backward; None: `forward_fn` is the model.

    Works with autocast (around `backward` too), loss scalers, activation checkpointing and `ActivationOffloader`.
    Costs one more forward pass, and memory for all outputs and their gradients.

    `forward_fn` has to do the same both times. Random numbers of torch and of Python are replayed, NumPy's are not.
    Modules that keep running statistics (BatchNorm in training mode) update them twice, and normalise by micro-batch.

    Example:
        >>> cache = GradientCache(accelerator, model, contrastive_loss)
        >>> for micro_batches in windows:
        ...     result = cache.step(micro_batches, optimizer, max_grad_norm=1.0)

    In a loop of one's own, `cache.backward(micro_batches)` takes the place of `accelerator.backward(loss)`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        forward_fn: Callable[[Any], Tensor | Outputs],
        loss_fn: Callable[..., Tensor],
        *,
        models: Sequence[nn.Module] | None = None,
    ) -> None:
        check_distributed_type(accelerator)
        if models is None and not isinstance(forward_fn, nn.Module) and accelerator.num_processes > 1:
            raise ValueError(
                "models=None needs a prepared model as forward_fn; give models=[...] that forward_fn calls"
            )
        self._accelerator = accelerator
        self._forward_fn = forward_fn
        self._loss_fn = loss_fn
        self._models: Sequence[Any] = models if models is not None else [forward_fn]

    def backward(self, micro_batches: Iterable[Any]) -> Tensor:
        """Adds the full batch's gradient to the parameters' `.grad`, as `accelerator.backward(loss)` would.

        Args:
            micro_batches: at least one on every rank, of any sizes. All are held meanwhile.

        Returns:
            The loss, `()`, without gradient history, the same on all ranks.

        Raises:
            ValueError: `micro_batches` is empty, or under FSDP2 of another number than on another rank; or `forward_fn`
                does not return tensors with samples first.

        After an exception gradients are incomplete: call `optimizer.zero_grad()`.
        """
        micro_batches = list(micro_batches)
        if not micro_batches:
            raise ValueError("micro_batches is empty on this rank; every rank needs at least one")
        self._check_number(len(micro_batches))
        # 1. All outputs, without graphs: only one micro-batch's activations exist at a time.
        outputs, states = self._forward_all(micro_batches)
        # 2. The loss of all of them, and its gradient by each output.
        loss, gradients = self._loss_and_gradients(outputs)
        # 3. Each micro-batch again, with its random numbers, and backward from its outputs' gradients. Random numbers
        #    then go on after those of the loss, as if nothing had run twice.
        after = RandomState(self._accelerator.device)
        self._backward_all(micro_batches, states, gradients)
        after.restore()
        return loss

    def step(
        self,
        micro_batches: Iterable[Any],
        optimizer: AcceleratedOptimizer,
        *,
        max_grad_norm: float | None = None,
        scheduler: Any = None,
    ) -> StepResult:
        """Drop gradients, run `backward`, clip, check, update: one optimizer step, as `train_step` makes it.

        What is clipped and checked is the gradient of `models`, and of `loss_fn` if it is a module.

        Args:
            micro_batches: as in `backward`.
            optimizer: prepared by the accelerator.
            max_grad_norm: clip the gradient to this L2 norm. None: do not clip.
            scheduler: stepped after the update, and not after a skipped one.

        Raises:
            ValueError: as from `backward`, as from `train_step` about the accelerator and the optimizer, or `models`
                were not given and `forward_fn` is none.
            NonFiniteGradientError: as from `train_step`. A loss of all samples has one gradient, so everything that is
                not finite is put down to micro-batch 1.
        """
        micro_batches = list(micro_batches)
        if not all(isinstance(model, nn.Module) for model in self._models):
            raise ValueError(
                "models=None: step clips and checks their gradients; give models=[...] that forward_fn calls"
            )
        modules = [each for each in (*self._models, self._loss_fn) if isinstance(each, nn.Module)]
        model = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        with open_step(self._accelerator, model, optimizer, max_grad_norm, scheduler) as step:
            loss = self.backward(micro_batches)
            step.watch.end_micro_batch()
            # Every rank has the whole loss, and the parts of all ranks are added up.
            return step.update(loss / self._accelerator.num_processes, len(micro_batches))

    def _check_number(self, number: int) -> None:
        """Each forward pass under FSDP2 gathers weights, which takes all ranks."""
        most = max_over_ranks(self._accelerator, number) if self._accelerator.is_fsdp2 else number
        least = -max_over_ranks(self._accelerator, -number) if self._accelerator.is_fsdp2 else number
        if most != least:
            raise ValueError(
                f"micro_batches: {number} on this rank, {least} to {most} on all; under FSDP2 give all ranks as many"
            )

    def _forward_all(self, micro_batches: Sequence[Any]) -> tuple[list[Outputs], list[RandomState]]:
        outputs, states = [], []
        with torch.no_grad():
            for micro_batch in micro_batches:
                states.append(RandomState(self._accelerator.device))
                outputs.append(self._forward(micro_batch))
        return outputs, states

    def _forward(self, micro_batch: Any) -> Outputs:
        output = self._forward_fn(micro_batch)
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        if not all(isinstance(each, Tensor) and each.ndim for each in outputs):
            raise ValueError(f"forward_fn returned {_kinds(outputs)}; return tensors whose first dimension is samples")
        return outputs

    def _loss_and_gradients(self, outputs: list[Outputs]) -> tuple[Tensor, list[list[Tensor | None]]]:
        """The loss of all outputs, and its gradient with respect to those of each micro-batch of this rank."""
        leaves = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
        sizes = [[len(part) for part in parts] for parts in zip(*outputs, strict=True)]
        # The concatenated copies are enough from here on.
        outputs.clear()
        for leaf in leaves:
            leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
        with _same_draws_on_all_ranks(self._accelerator):
            loss = self._loss_fn(*(_of_all_ranks(self._accelerator, leaf) for leaf in leaves))
        # accelerator.backward divides by gradient_accumulation_steps, so multiply first. The loss scale that it applies
        # here carries over to the gradients of the outputs, and from them to all that follow.
        self._accelerator.backward(loss * self._accelerator.gradient_accumulation_steps)
        gradients = [self._cut(leaf.grad, lengths) for leaf, lengths in zip(leaves, sizes, strict=True)]
        return loss.detach(), [list(each) for each in zip(*gradients, strict=True)]

    def _cut(self, gradient: Tensor | None, sizes: list[int]) -> Sequence[Tensor | None]:
        if gradient is None:
            return [None] * len(sizes)
        # Every rank computed the gradient of the whole loss, and keeps the part of its own outputs. The parameters'
        # gradient is the sum over ranks; DDP takes the mean, so multiply by the number of ranks here.
        parts: tuple[Tensor, ...] = torch.split(gradient * self._accelerator.num_processes, sizes)
        return parts

    def _backward_all(
        self, micro_batches: Sequence[Any], states: list[RandomState], gradients: list[list[Tensor | None]]
    ) -> None:
        for number, micro_batch in enumerate(micro_batches):
            # Ranks exchange gradients once, in the backward of the last micro-batch.
            is_due = number == len(micro_batches) - 1 or exchanges_each_batch(self._accelerator)
            with exchange_if(self._accelerator, self._models, is_due):
                states[number].restore()
                _backward(self._forward(micro_batch), gradients[number])


def _backward(outputs: Outputs, gradients: list[Tensor | None]) -> None:
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad and gradient is not None
    ]
    torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


@contextmanager
def _same_draws_on_all_ranks(accelerator: Accelerator) -> Iterator[None]:
    """Random numbers inside are the same on all ranks, and each rank's own go on afterwards as they were."""
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
    """The samples of all ranks, in the order of ranks, with this rank's own tensor in its place in the graph."""
    if accelerator.num_processes == 1:
        return own
    sizes = accelerator.gather(torch.tensor([len(own)], device=own.device)).tolist()
    padded = accelerator.gather(accelerator.pad_across_processes(own.detach()).contiguous())
    parts = [part[:size] for part, size in zip(padded.split(max(sizes)), sizes, strict=True)]
    parts[accelerator.process_index] = own
    return torch.cat(parts)


def _kinds(outputs: Iterable[Any]) -> str:
    return ", ".join(
        f"a tensor {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__ for each in outputs
    )
